"""The Kubernetes launcher with the official client, against a stand-in of the API server. It was never run on a cluster."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="the extra `kubernetes` is not installed")

import yaml
from kubernetes import client

from deploy.launch.kubernetes import LABEL, MODEL, KubernetesLauncher, open_launcher
from gateway.scaling.launcher import LauncherError, LaunchState
from migration.leg import InstanceId
from tests.deploy.launch.cluster import CREATED, NAMESPACE, ApiServer, unknown_fields
from tests.deploy.launch.suite import A, B, Bench, LauncherSuite, bench_of
from tests.gateway.conftest import live

MANIFESTS = Path(__file__).resolve().parents[3] / "deploy" / "kubernetes"


@pytest.fixture
async def cluster() -> AsyncIterator[ApiServer]:
    server = ApiServer()
    server.add("llama", "llama-8b")
    yield server
    assert not server.complaints


@pytest.fixture
async def kubernetes(cluster: ApiServer) -> AsyncIterator[KubernetesLauncher]:
    async with live(cluster.app()) as url:
        configuration = client.Configuration()
        configuration.host = url
        configuration.retries = False
        with client.ApiClient(configuration) as api:
            yield KubernetesLauncher(
                client.AppsV1Api(api), client.CoreV1Api(api), NAMESPACE, timeout_s=5.0, now=lambda: CREATED + timedelta(seconds=90)
            )


class TestKubernetes(LauncherSuite):
    @pytest.fixture
    async def bench(self, cluster: ApiServer, kubernetes: KubernetesLauncher) -> AsyncIterator[Bench]:
        async def settle() -> None:
            cluster.reap()

        async with bench_of(kubernetes, settle) as bench:
            yield bench


async def test_pods_are_named_by_their_set(cluster: ApiServer, kubernetes: KubernetesLauncher) -> None:
    cluster.add("qwen", "qwen-7b")
    assert await kubernetes.launch(A, None) == "llama-0"
    assert await kubernetes.launch(B, "qwen-7b") == "qwen-0"
    assert await kubernetes.launch(InstanceId("three"), "qwen-7b") == "qwen-1"
    seen = [(each.instance, each.model, each.age_s, each.stoppable) for each in await kubernetes.list()]
    assert seen == [("llama-0", "llama-8b", 90.0, True), ("qwen-0", "qwen-7b", 90.0, False), ("qwen-1", "qwen-7b", 90.0, True)]
    with pytest.raises(LauncherError, match="'other'"):
        await kubernetes.launch(InstanceId("four"), "other")


async def test_only_the_last_pod_is_stopped(cluster: ApiServer, kubernetes: KubernetesLauncher) -> None:
    await kubernetes.launch(A, None)
    await kubernetes.launch(B, None)
    with pytest.raises(LauncherError, match="llama-1"):
        await kubernetes.stop(InstanceId("llama-0"))
    await kubernetes.stop(InstanceId("llama-1"))
    assert [(each.instance, each.state) for each in await kubernetes.list()] == [
        ("llama-0", LaunchState.RUNNING),
        ("llama-1", LaunchState.STOPPING),
    ]
    cluster.reap()
    # Its key is free again.
    assert await kubernetes.launch(B, None) == "llama-1"


async def test_a_pod_that_is_not_there_yet_is_running(cluster: ApiServer, kubernetes: KubernetesLauncher) -> None:
    await kubernetes.launch(A, None)
    cluster.pods.clear()
    (launched,) = await kubernetes.list()
    assert (launched.instance, launched.state, launched.age_s) == ("llama-0", LaunchState.RUNNING, 0.0)


@pytest.mark.parametrize(
    ("status", "detail"),
    [
        ({"phase": "Failed"}, "the pod has failed"),
        ({"phase": "Pending", "containerStatuses": [{"waiting": "CrashLoopBackOff"}]}, "CrashLoopBackOff: back-off 5m0s"),
        ({"phase": "Pending", "containerStatuses": [{"waiting": "ContainerCreating"}]}, ""),
    ],
)
async def test_a_pod_that_will_not_become_ready(
    cluster: ApiServer, kubernetes: KubernetesLauncher, status: dict[str, Any], detail: str
) -> None:
    await kubernetes.launch(A, None)
    for each in status.get("containerStatuses", ()):
        each["state"] = {"waiting": {"reason": each.pop("waiting"), "message": "back-off 5m0s"}}
        each |= {"name": "backend", "image": "x", "imageID": "x", "ready": False, "restartCount": 5}
    cluster.pods["llama-0"]["status"] = status
    (launched,) = await kubernetes.list()
    assert launched.detail == detail
    assert launched.state is (LaunchState.EXITED if detail else LaunchState.RUNNING)


async def test_a_change_by_somebody_else_is_no_success(cluster: ApiServer, kubernetes: KubernetesLauncher) -> None:
    cluster.conflicts = 1
    with pytest.raises(LauncherError, match="somebody else"):
        await kubernetes.launch(A, None)
    assert await kubernetes.list() == []
    assert await kubernetes.launch(A, None) == "llama-0"


async def test_an_api_server_that_is_not_there() -> None:
    configuration = client.Configuration()
    configuration.host = "http://127.0.0.1:9"
    configuration.retries = False
    with client.ApiClient(configuration) as api:
        launcher = KubernetesLauncher(client.AppsV1Api(api), client.CoreV1Api(api), NAMESPACE, timeout_s=1.0, now=lambda: CREATED)
        with pytest.raises(LauncherError, match="does not answer"):
            await launcher.list()


def test_no_cluster_to_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(LauncherError, match="no access"):
        open_launcher(NAMESPACE, 1.0, lambda: CREATED)


def test_the_stand_in_knows_the_schemas() -> None:
    assert unknown_fields(client.V1StatefulSet, {"spec": {"replica": 1}}) == ["unknown field spec.replica"]
    assert unknown_fields(client.V1StatefulSet, {"metadata": {"resourceVersion": "1", "annotations": {"any": "x"}}}) == []


SCHEMAS = {
    "Deployment": client.V1Deployment,
    "StatefulSet": client.V1StatefulSet,
    "Service": client.V1Service,
    "Secret": client.V1Secret,
    "ServiceAccount": client.V1ServiceAccount,
    "Role": client.V1Role,
    "RoleBinding": client.V1RoleBinding,
}


def documents() -> list[dict[str, Any]]:
    return [each for file in sorted(MANIFESTS.glob("*.yaml")) for each in yaml.safe_load_all(file.read_text())]


def test_the_manifests_fit_the_schemas() -> None:
    for each in documents():
        assert unknown_fields(SCHEMAS[each["kind"]], each) == []
    assert {each["kind"] for each in documents()} == SCHEMAS.keys()


def test_the_manifests_say_what_the_launcher_reads() -> None:
    (backend,) = [each for each in documents() if each["kind"] == "StatefulSet"]
    name = backend["metadata"]["name"]
    for labels in (
        backend["metadata"]["labels"],
        backend["spec"]["selector"]["matchLabels"],
        backend["spec"]["template"]["metadata"]["labels"],
    ):
        assert labels == {LABEL: name}
    assert MODEL in backend["metadata"]["annotations"]
    pod = backend["spec"]["template"]["spec"]
    settings = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    assert "MIDSTREAM_INSTANCE_ID" in settings
    assert pod["terminationGracePeriodSeconds"] > float(settings["MIDSTREAM_DRAIN_DEADLINE_S"])
    assert backend["spec"]["podManagementPolicy"] == "Parallel"
    (role,) = [each for each in documents() if each["kind"] == "Role"]
    assert [(rule["resources"], rule["verbs"]) for rule in role["rules"]] == [(["statefulsets"], ["list", "patch"]), (["pods"], ["list"])]
