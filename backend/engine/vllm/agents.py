"""The API process's side of the KV agents: one order to every rank at once."""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from backend.engine.vllm import agent_wire as wire
from migration.channel.base import ABORTED, OVERTAKEN
from migration.errors import ChannelError, ChannelTimeout, ChannelUnknown
from migration.leg import InstanceId
from migration.messages import ChannelOffer


@dataclass(eq=False, slots=True)
class Agents:
    """All ranks of one engine, and the channels they have with other engines, by peer."""

    ranks: tuple[wire.Started, ...]
    outgoing: dict[InstanceId, ChannelOffer] = field(default_factory=dict)
    incoming: dict[InstanceId, ChannelOffer] = field(default_factory=dict)

    @property
    def backend(self) -> str:
        return self.ranks[0].backend

    async def offer(self, peer: InstanceId, *, fresh: bool, timeout_s: float) -> ChannelOffer:
        """The channel to that peer: the cached one, or a new one that opens while the offer travels."""
        known = self.outgoing.get(peer)
        if known is not None and not fresh:
            return known
        if known is not None:
            await self.drop_outgoing(peer, timeout_s)
        incarnation = secrets.token_hex(8)
        replies = await self._all([wire.Offer(incarnation)] * len(self.ranks), timeout_s)
        addresses = tuple(reply.address for reply in replies if isinstance(reply, wire.Offered))
        offer = ChannelOffer(self.backend, incarnation, addresses)
        self.outgoing[peer] = offer
        return offer

    async def accept(self, peer: InstanceId, offer: ChannelOffer, timeout_s: float) -> None:
        """Join the channel that the peer offers; instant if it is joined. A channel it replaces is closed."""
        if offer.kind != self.backend or len(offer.addresses) != len(self.ranks):
            raise ChannelError(f"cannot join a {offer.kind} channel of {len(offer.addresses)} ranks", reason="channel_kind")
        known = self.incoming.get(peer)
        if known is not None and known.incarnation != offer.incarnation:
            del self.incoming[peer]
            await self._all([wire.Close(known.incarnation)] * len(self.ranks), timeout_s)
        await self._all([wire.Accept(offer.incarnation, address) for address in offer.addresses], timeout_s)
        self.incoming[peer] = offer

    async def send(self, peer: InstanceId, transfer: int, blocks: list[int], timeout_s: float) -> int:
        """Bytes sent over all ranks. If it fails or is cancelled the channel is dropped: a half-sent transfer must not hold up the next."""
        offer = self.outgoing.get(peer)
        if offer is None:
            raise ChannelUnknown(f"no channel to {peer}")
        try:
            replies = await self._all([wire.Send(offer.incarnation, transfer, blocks)] * len(self.ranks), timeout_s)
        except (ChannelError, asyncio.CancelledError):
            await asyncio.shield(self.drop_outgoing(peer, timeout_s))
            raise
        return sum(reply.bytes for reply in replies if isinstance(reply, wire.Moved))

    async def receive(self, peer: InstanceId, transfer: int, blocks: list[int], timeout_s: float) -> None:
        offer = self.incoming.get(peer)
        if offer is None:
            raise ChannelUnknown(f"no channel from {peer}")
        try:
            await self._all([wire.Receive(offer.incarnation, transfer, blocks)] * len(self.ranks), timeout_s)
        except ChannelError as error:
            if error.reason not in (ABORTED, OVERTAKEN):
                self.incoming.pop(peer, None)
                await self._all([wire.Close(offer.incarnation)] * len(self.ranks), timeout_s)
            raise

    async def export_sampler(self, request: str, timeout_s: float) -> tuple[bytes, ...]:
        replies = await self._all([wire.ExportSampler(request)] * len(self.ranks), timeout_s)
        return tuple(reply.state for reply in replies if isinstance(reply, wire.Sampler))

    async def adopt(self, orders: Sequence[wire.Adopt], timeout_s: float) -> None:
        await self._all(orders, timeout_s)

    async def drop_outgoing(self, peer: InstanceId, timeout_s: float) -> None:
        offer = self.outgoing.pop(peer, None)
        if offer is not None:
            await self._all([wire.Close(offer.incarnation)] * len(self.ranks), timeout_s)

    async def _all(self, orders: Sequence[wire.Order], timeout_s: float) -> list[wire.Reply]:
        """One order a rank, at the same time. The first refusal is raised, after all have answered."""
        tasks: list[asyncio.Task[wire.Reply]] = []
        async with asyncio.TaskGroup() as group:
            for rank, order in zip(self.ranks, orders, strict=True):
                tasks.append(group.create_task(_ask(rank, order, timeout_s)))
        replies = [task.result() for task in tasks]
        for reply in replies:
            if isinstance(reply, wire.Refused):
                raise _as_error(reply)
        return replies


async def _ask(rank: wire.Started, order: wire.Order, timeout_s: float) -> wire.Reply:
    """One connection, one order. A timeout or a dead worker is answered as a refusal."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(rank.path)
            try:
                writer.write(wire.frame(wire.encode(order)))
                head = await reader.readexactly(4)
                return wire.decode_reply(await reader.readexactly(int.from_bytes(head, "big")))
            finally:
                writer.close()
    except TimeoutError:
        return wire.Refused("channel_timeout", f"rank {rank.rank} did not answer within {timeout_s:.1f} s")
    except (OSError, asyncio.IncompleteReadError) as error:
        return wire.Refused("agent_gone", f"rank {rank.rank}: {error}")


def _as_error(refused: wire.Refused) -> ChannelError:
    kinds = {"channel_timeout": ChannelTimeout, "channel_unknown": ChannelUnknown}
    return kinds.get(refused.reason, ChannelError)(refused.detail, reason=refused.reason)
