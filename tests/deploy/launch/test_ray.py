"""The Ray launcher on a real Ray cluster of two nodes, both on this machine; its backends have modelled engines."""

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="the extra `ray` is not installed")

import ray
from ray.cluster_utils import Cluster

from deploy.launch.ray import BackendSpec, RayLauncher
from deploy.up import Model
from gateway.scaling.launcher import LaunchState
from tests.deploy.launch.suite import A, B, Bench, C, LauncherSuite, bench_of

pytestmark = [pytest.mark.timeout(300), pytest.mark.ray]

STORE_BYTES = 80 * 2**20
NOWHERE = "redis://127.0.0.1:9/0"
NAMESPACES = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patched.setenv("MIDSTREAM_HOME", str(tmp_path_factory.mktemp("home")))
        node = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": STORE_BYTES}
        nodes = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        try:
            nodes.add_node(**node)
            ray.init(address=nodes.address, namespace="tests", log_to_driver=False, configure_logging=False)
            yield
        finally:
            ray.shutdown()
            nodes.shutdown()


@pytest.fixture
def launcher(cluster: None) -> Iterator[RayLauncher]:
    """In a namespace of its own. Each backend asks for a whole node's core."""
    namespace = f"n{next(NAMESPACES)}"
    spec = BackendSpec("fake", Model("fake", "fake"), NOWHERE, {"num_cpus": 1}, kill_after_s=20.0)
    yield RayLauncher(spec, namespace)
    for each in ray.util.list_named_actors(all_namespaces=True):
        if each["namespace"] == namespace:
            ray.kill(ray.get_actor(each["name"], namespace=namespace))


class TestRay(LauncherSuite):
    @pytest.fixture
    async def bench(self, launcher: RayLauncher) -> AsyncIterator[Bench]:
        async with bench_of(launcher) as bench:
            yield bench

    async def test_one_that_finds_no_room_waits_and_is_known_to_the_next_launcher(self, bench: Bench, launcher: RayLauncher) -> None:
        for key in (A, B, C):
            await bench.launcher.launch(key, None, 1)
        known = await bench.wait(lambda known: sum(each.age_s > 0 for each in known.values()) == 2)
        assert known[C].detail == "waits for resources"
        other = RayLauncher(launcher._spec, launcher._namespace)
        assert [(each.instance, each.order) for each in await other.list()] == [(A, 1), (B, 2), (C, 3)]
        await bench.launcher.stop(C, 1)
        await bench.wait(lambda known: C not in known)

    async def test_one_that_dies_is_known_with_its_last_words(self, bench: Bench) -> None:
        await bench.launcher.launch(A, None, 1)
        await bench.wait(lambda known: known[A].age_s > 0)
        for pid in processes_of(A):
            os.kill(pid, signal.SIGKILL)
        known = await bench.wait(lambda known: known[A].state is LaunchState.EXITED)
        assert "SIGKILL" in known[A].detail

    async def test_a_process_does_not_outlive_its_actor(self, bench: Bench, launcher: RayLauncher) -> None:
        await bench.launcher.launch(A, None, 1)
        await bench.wait(lambda known: known[A].age_s > 0)
        assert processes_of(A)
        (name,) = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == launcher._namespace]
        ray.kill(ray.get_actor(name, namespace=launcher._namespace))
        async with asyncio.timeout(30):
            while processes_of(A):
                await asyncio.sleep(0.05)


def processes_of(instance: str) -> list[int]:
    """Backends with that instance id."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"--instance-id" in command and instance.encode() in command and b"fake" in command:
            found.append(int(process.name))
    return found
