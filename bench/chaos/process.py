"""One process of the fleet, which may be killed, stopped, hung and started again."""

import asyncio
import os
import signal
from dataclasses import dataclass, replace

from deploy.health import Probe
from deploy.process import Child, Program, Supervisor

STOP_TIMEOUT_S = 20.0


@dataclass(eq=False)
class Process:
    """`troubles` counts what was done to it: whoever was connected before and is cut now knows why."""

    program: Program
    supervisor: Supervisor
    probe: Probe
    start_timeout_s: float
    child: Child | None = None
    starts: int = 0
    troubles: int = 0
    hung: bool = False

    @property
    def alive(self) -> bool:
        return self.child is not None and self.child.process.returncode is None

    @property
    def pid(self) -> int:
        assert self.child is not None, f"{self.program.name} was not started"
        return self.child.process.pid

    async def start(self) -> None:
        """Start it, again if need be, with the same command; return once it is healthy."""
        await self.spawn()
        assert self.child is not None
        await self.supervisor.wait_healthy(self.child, self.probe, self.start_timeout_s)

    async def spawn(self) -> None:
        """Start it, and return at once."""
        self.starts += 1
        name = self.program.name if self.starts == 1 else f"{self.program.name}-{self.starts}"
        self.child = await self.supervisor.start(replace(self.program, name=name))

    async def kill(self) -> None:
        """SIGKILL, for its whole process group; returns when it is gone."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """SIGTERM; killed if that is not enough. Returns when it is gone."""
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._end(signal.SIGTERM)
        except TimeoutError:
            await self._end(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM, and return at once."""
        assert self.child is not None
        self.troubles += 1
        self.child.stopping = True  # else the supervisor takes it for an accident
        self.child.process.send_signal(signal.SIGTERM)

    def hang(self) -> None:
        """SIGSTOP: its sockets stay open, and nobody answers."""
        self.troubles += 1
        self.hung = True
        os.killpg(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT, if it hangs."""
        if self.hung and self.alive:
            os.killpg(self.pid, signal.SIGCONT)
        self.hung = False

    async def _end(self, number: signal.Signals) -> None:
        assert self.child is not None
        if number is signal.SIGKILL:
            self.troubles += 1
            self.child.stopping = True
            os.killpg(self.pid, number)
        else:
            self.terminate()
        await self.child.process.wait()
        self.hung = False
