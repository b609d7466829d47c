"""What every launcher does, whatever it starts: one suite, run by each launcher's own tests over the real service."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from deploy.launch.service import LauncherService, Starter
from gateway.scaling.http_launcher import HttpLauncher
from gateway.scaling.launcher import Launched, LauncherError, LaunchState
from gateway.upstream import Upstream
from migration.leg import InstanceId
from tests.gateway.conftest import live

TOKEN = "secret"
A, B, C = (InstanceId(name) for name in ("one", "two", "three"))
WITHIN_S = 20.0


@dataclass(eq=False)
class Bench:
    """A launcher as a gateway sees it, and how a test makes the world behind it go on."""

    launcher: HttpLauncher
    settle: Callable[[], Awaitable[None]]
    """Let what was told to stop be gone."""
    upstream: Upstream
    url: str

    async def known(self) -> dict[InstanceId, Launched]:
        return {each.instance: each for each in await self.launcher.list()}

    async def wait(self, reached: Callable[[dict[InstanceId, Launched]], bool]) -> dict[InstanceId, Launched]:
        async with asyncio.timeout(WITHIN_S):
            while not reached(known := await self.known()):
                await self.settle()
                await asyncio.sleep(0.01)
        return known


async def nothing() -> None:
    return None


@asynccontextmanager
async def bench_of(starter: Starter, settle: Callable[[], Awaitable[None]] = nothing) -> AsyncIterator[Bench]:
    async with live(LauncherService(starter, TOKEN).app()) as url, Upstream.open(5.0) as upstream:
        yield Bench(HttpLauncher(upstream, url, TOKEN, 10.0), settle, upstream, url)


class LauncherSuite:
    """Subclasses give the fixture `bench`."""

    async def test_what_is_launched_is_listed_in_its_order(self, bench: Bench) -> None:
        names = [await bench.launcher.launch(key, None, 1) for key in (A, B)]
        known = await bench.launcher.list()
        assert [each.instance for each in known] == names
        assert known[0].order < known[1].order
        assert {each.state for each in known} == {LaunchState.RUNNING}
        assert all(each.model and each.age_s >= 0 for each in known)

    async def test_a_launch_that_is_repeated_is_the_same_one(self, bench: Bench) -> None:
        first = await bench.launcher.launch(A, None, 1)
        assert await bench.launcher.launch(A, None, 1) == first
        assert len(await bench.known()) == 1

    async def test_what_is_stopped_goes_and_can_be_launched_again(self, bench: Bench) -> None:
        await bench.launcher.launch(A, None, 1)
        last = await bench.launcher.launch(B, None, 1)
        assert (await bench.known())[last].stoppable
        for _ in range(3):
            await bench.launcher.stop(last, 1)
        await bench.wait(lambda known: last not in known)
        await bench.launcher.stop(last, 1)
        again = await bench.launcher.launch(B, None, 1)
        known = await bench.wait(lambda known: again in known and known[again].state is LaunchState.RUNNING)
        assert len(known) == 2

    async def test_an_unknown_instance_is_stopped_already(self, bench: Bench) -> None:
        await bench.launcher.stop(C, 1)
        assert await bench.known() == {}

    async def test_whoever_was_replaced_is_refused(self, bench: Bench) -> None:
        await bench.launcher.launch(A, None, 7)
        with pytest.raises(LauncherError, match="taken over"):
            await bench.launcher.launch(B, None, 6)
        with pytest.raises(LauncherError, match="taken over"):
            await bench.launcher.stop(A, 6)
        assert len(await bench.known()) == 1

    async def test_the_token_is_asked_for(self, bench: Bench) -> None:
        for token in (None, "wrong"):
            with pytest.raises(LauncherError, match="token"):
                await HttpLauncher(bench.upstream, bench.url, token, 5.0).list()
