"""Carries out faults. Each begins, lasts and is over; what is dead is started again."""

import asyncio
from random import Random

from bench.chaos.fleet import HOST, BackendPart, ChaosFleet
from bench.chaos.plan import Fault, Iteration

DELAY_S = 0.05


async def inflict(fleet: ChaosFleet, iteration: Iteration) -> None:
    """Do it, and undo it."""
    kind = iteration.fault.value
    if kind.endswith("_backend"):
        await _at_backend(fleet.backends[iteration.target], iteration)
    elif kind.endswith("_gateway"):
        await _at_gateway(fleet, iteration)
    elif iteration.fault is Fault.SCALE_IN_AND_OUT:
        await fleet.operate("scale-in", {"instance": fleet.backends[iteration.target].id}, iteration.number)
        await fleet.operate("scale-out", {"count": 1}, iteration.number + 1)
    else:
        await _at_redis(fleet, iteration)


async def _at_backend(backend: BackendPart, iteration: Iteration) -> None:
    process, proxy, lasts_s = backend.process, backend.proxy, iteration.lasts_s
    match iteration.fault:
        case Fault.KILL_BACKEND:
            await process.kill()
            await process.start()
        case Fault.STOP_BACKEND:
            await process.stop()
            await process.start()
        case Fault.HANG_BACKEND:
            process.hang()
            await asyncio.sleep(lasts_s)
            process.go_on()
        case Fault.PARTITION_BACKEND:
            proxy.partition()
            backend.to_redis.partition()
            await asyncio.sleep(lasts_s)
            proxy.heal()
            backend.to_redis.heal()
        case Fault.CUT_BACKEND:
            for _ in range(Random(iteration.number).randint(1, 3)):
                proxy.cut()
                await asyncio.sleep(lasts_s / 4)
        case Fault.DELAY_BACKEND:
            proxy.delay_s = DELAY_S
            await asyncio.sleep(lasts_s)
            proxy.heal()


async def _at_gateway(fleet: ChaosFleet, iteration: Iteration) -> None:
    gateway = fleet.gateways[iteration.target]
    match iteration.fault:
        case Fault.KILL_GATEWAY:
            await fleet.count()
            await gateway.process.kill()
            await gateway.process.start()
        case Fault.STOP_GATEWAY:
            await fleet.count()
            await gateway.process.stop()
            await gateway.process.start()
        case Fault.HANG_GATEWAY:
            gateway.process.hang()
            await asyncio.sleep(iteration.lasts_s)
            gateway.process.go_on()
        case Fault.PARTITION_GATEWAY:
            gateway.to_redis.partition()
            await asyncio.sleep(iteration.lasts_s)
            gateway.to_redis.heal()


async def _at_redis(fleet: ChaosFleet, iteration: Iteration) -> None:
    match iteration.fault:
        case Fault.KILL_REDIS:
            await fleet.redis.kill()
            await asyncio.sleep(iteration.lasts_s)
            await fleet.redis.start()
        case Fault.HANG_REDIS:
            fleet.redis.hang()
            await asyncio.sleep(iteration.lasts_s)
            fleet.redis.go_on()
        case Fault.FLUSH_REDIS:
            await _flush(fleet.redis_port)


async def _flush(port: int) -> None:
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(b"FLUSHALL\r\n")
        await reader.readline()
    finally:
        writer.close()
