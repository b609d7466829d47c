"""What live gateways have decided comes out again."""

import asyncio
import json
import time
from pathlib import Path

import httpx
import pytest

from backend.registry.memory import MemoryStore
from deploy import cli
from simulator.parity import ParityError, check, entries_of
from tests.gateway.conftest import until
from tests.gateway.fake_fleet import fleet, gateway
from tests.gateway.test_rebalancer import play, policy


async def told_by_a_gateway() -> str:
    """`/admin/decisions` of one that has placed requests and moved some."""
    store = MemoryStore(time.monotonic)
    async with fleet(store) as scene, gateway(store, policy(requeue=False)) as url, httpx.AsyncClient(timeout=10) as client:
        await play(scene, url)
        await until(lambda: all(stream.done for stream in scene.streams), within_s=20)
        return (await client.get(f"{url}/admin/decisions?limit=1000")).text


async def test_every_decision_of_a_live_gateway_comes_out_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = await told_by_a_gateway()
    parity = check(entries_of(text))
    assert parity.holds, parity
    assert parity.replayed["dispatch"] >= 5
    assert parity.replayed["pairing"] + parity.replayed.get("trade", 0) >= 1

    file = tmp_path / "decisions.json"
    file.write_text(text)
    assert await asyncio.to_thread(cli.main, ["replay", "--decisions", str(file)]) == 0
    assert "0 came out otherwise; 0 could not be read" in capsys.readouterr().out

    # As a gateway's log has them, among other lines; and with one that was tampered with.
    entries = json.loads(text)["decisions"]
    tampered = next(entry for entry in entries if entry["kind"] == "dispatch")
    tampered["decision"]["order"][0][0] = "elsewhere"
    file.write_text("\n".join(["started {", *(f"2026-01-31 INFO decisions {json.dumps(entry)}" for entry in entries)]))
    assert await asyncio.to_thread(cli.main, ["replay", "--decisions", str(file), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [entry["number"] for entry in report["differing"]] == [tampered["number"]]
    assert sum(report["replayed"].values()) == len(entries)


def test_what_cannot_be_read_is_counted() -> None:
    parity = check([{"number": 7, "decision": {"kind": "bind"}}])
    assert not parity.holds
    assert parity.unread[0].startswith("7: ")


def test_a_file_without_decisions_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ParityError):
        entries_of("a line\n{}\n")
    assert cli.main(["replay", "--decisions", str(tmp_path / "nothing")]) == 2
    assert "error" in capsys.readouterr().err
    assert cli.main(["replay"]) == 2
