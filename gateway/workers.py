"""Several gateway processes behind one port: one listening socket that all of them accept from, and a supervisor that restarts the dead.

The supervisor opens the socket, starts `python -m gateway --fd N` for each worker, and hands SIGTERM and SIGINT on. All that workers share
is in the store. A worker whose supervisor is gone stops by itself.
"""

import asyncio
import ctypes
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from prometheus_client.multiprocess import mark_process_dead

from backend.registry.address import MEMORY
from gateway.settings import GatewaySettings, worker_environment

BACKLOG = 4096
RESTART_S = 0.2
"""A worker that dies is replaced after so long; after twice that if the next one dies at once, and so on."""
LONGEST_RESTART_S = 5.0
STOP_MARGIN_S = 5.0
"""What workers get beyond their grace before they are killed."""
_PR_SET_PDEATHSIG = 1

log = logging.getLogger("midstream.gateway.workers")


class NotShared(Exception):
    """Several workers were asked for, with a store that only one process sees."""


def supervise(settings: GatewaySettings) -> None:
    """Run `settings.workers` workers until SIGINT or SIGTERM. Raises NotShared, OSError (the port cannot be had)."""
    if settings.store_url == MEMORY:
        raise NotShared("several workers share their state in Redis: name one with --redis, or run one worker")
    metrics = Path(tempfile.mkdtemp(prefix="midstream-metrics-"))
    try:
        with open_listener(settings.host, settings.port) as listener:
            log.info("listening on port %d with %d workers", listener.getsockname()[1], settings.workers)
            asyncio.run(_Supervisor(settings, listener, metrics).run())
    finally:
        shutil.rmtree(metrics, ignore_errors=True)


def open_listener(host: str, port: int) -> socket.socket:
    """The socket that all workers accept from. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    listener.set_inheritable(True)
    return listener


def follow(parent: int) -> None:
    """For a worker: stop when the supervisor is gone, however it went."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the supervisor is gone")


class _Supervisor:
    def __init__(self, settings: GatewaySettings, listener: socket.socket, metrics: Path) -> None:
        self._settings = settings
        self._listener = listener
        self._metrics = metrics
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        async with asyncio.TaskGroup() as group:
            for slot in range(self._settings.workers):
                group.create_task(self._keep(slot))

    async def _keep(self, slot: int) -> None:
        """One worker after the other, until the supervisor is told to stop."""
        delay_s = RESTART_S
        while not self._stopping.is_set():
            began_s = asyncio.get_running_loop().time()
            await self._run_one(slot)
            if self._stopping.is_set():
                return
            if asyncio.get_running_loop().time() - began_s > LONGEST_RESTART_S:
                delay_s = RESTART_S
            try:
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()
            except TimeoutError:
                delay_s = min(LONGEST_RESTART_S, 2 * delay_s)

    async def _run_one(self, slot: int) -> None:
        fd = self._listener.fileno()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway", "--fd", str(fd), "--supervisor", str(os.getpid())),
            env=self._environment(slot),
            pass_fds=(fd,),
        )
        async with asyncio.TaskGroup() as group:
            ending = group.create_task(self._end(process))
            code = await process.wait()
            ending.cancel()
        mark_process_dead(process.pid, str(self._metrics))  # type: ignore[no-untyped-call]
        if not self._stopping.is_set():
            log.error("worker %d (process %d) ended with %d; another one takes its place", slot, process.pid, code)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Once told to stop: ask, wait for its grace, kill."""
        await self._stopping.wait()
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(self._settings.shutdown_grace_s + STOP_MARGIN_S)
        process.kill()

    def _environment(self, slot: int) -> Mapping[str, str]:
        name = f"{self._settings.gateway_id}-{slot}"
        return worker_environment(self._settings, name, self._metrics)
