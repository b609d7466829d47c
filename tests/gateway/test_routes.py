from tests.gateway.conftest import Rig


async def test_models_are_merged(rig: Rig) -> None:
    assert (await rig.client.get("/v1/models")).json() == {"object": "list", "data": []}
    await rig.add("a", models=("m", "x"))
    await rig.add("b", models=("m",))
    data = (await rig.client.get("/v1/models")).json()["data"]
    assert [card["id"] for card in data] == ["m", "x"]
    assert all(card["object"] == "model" and isinstance(card["created"], int) and card["owned_by"] == "midstream" for card in data)
    assert (await rig.client.get("/v1/models/x")).json()["id"] == "x"
    missing = await rig.client.get("/v1/models/y")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_health(rig: Rig) -> None:
    assert (await rig.client.get("/health")).json() == {"status": "degraded", "instances": 0, "store": "up"}
    await rig.add("a")
    assert (await rig.client.get("/health")).json() == {"status": "ok", "instances": 1, "store": "up"}


async def test_unknown_routes_and_methods_in_openais_shape(rig: Rig) -> None:
    for path, method, status in (
        ("/v1/nope", "GET", 404),
        ("/", "GET", 404),
        ("/v1/chat/completions", "GET", 405),
        ("/health", "POST", 405),
    ):
        response = await rig.client.request(method, path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_metrics(rig: Rig) -> None:
    response = await rig.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert "midstream_gateway_live_requests 0.0" in response.text
