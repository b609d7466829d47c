"""One fleet of real engines for all tests of this folder: starting it takes most of their time."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fleet() -> AsyncIterator[object]:
    pytest.importorskip("vllm", reason="the light environment has no vllm")
    from backend.engine.vllm import server
    from tests.backend.engine.vllm import paced
    from tests.backend.engine.vllm.fleet import open_fleet

    with pytest.MonkeyPatch.context() as environment:
        for name, value in {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }.items():
            environment.setenv(name, value)
        environment.setattr(server, "SCHEDULER", f"{paced.__name__}.{paced.PacedScheduler.__name__}")
        environment.setattr(server, "ASYNC_SCHEDULER", f"{paced.__name__}.{paced.PacedAsyncScheduler.__name__}")
        async with open_fleet() as opened:
            yield opened
