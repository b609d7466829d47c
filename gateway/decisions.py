"""Why things are where they are: each dispatch and each move with what was seen when it was decided. Kept for a while, logged, counted."""

import json
import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from gateway.metrics import Metrics
from gateway.policy.decision import Bind, Decision, Dispatch, Pairing, Release, Trade, bind_scores, scores, to_json
from gateway.policy.rebalance import Reason
from migration.choice import Move, Standing
from migration.leg import InstanceId, RequestId

KINDS = ("dispatch", "bind", "move", "release")
LOGGED = {"none": (), "moves": ("move", "release"), "all": KINDS}
"""The kinds that are lines of the log, by MIDSTREAM_LOG_DECISIONS."""

log = logging.getLogger("midstream.gateway.decisions")


@dataclass(frozen=True, slots=True)
class Moving:
    """A move is ordered: its source offered the request when it was asked with these sums; `why` is what had it asked."""

    move: Move
    source: Standing
    destination: Standing
    reason: Reason
    why: Pairing | Trade
    kind: Literal["move"] = "move"


@dataclass(frozen=True, slots=True)
class Releasing:
    """Requests that wait for memory on that instance are offered to their gateways, which have them wait in line instead."""

    requests: tuple[RequestId, ...]
    source: Standing
    why: Release
    kind: Literal["release"] = "release"


@dataclass(frozen=True, slots=True)
class Noted:
    """An entry. `number` rises by one with each of this gateway."""

    number: int
    at: datetime
    what: Dispatch | Bind | Moving | Releasing

    @property
    def requests(self) -> Sequence[RequestId]:
        """Whom it is about."""
        match self.what:
            case Dispatch():
                return (self.what.request.request,)
            case Bind():
                return tuple(binding.request for binding in self.what.bindings)
            case Moving():
                return (self.what.move.request,)
            case Releasing():
                return self.what.requests

    @property
    def chosen(self) -> Sequence[InstanceId]:
        """The instances that were chosen."""
        match self.what:
            case Dispatch():
                return (self.what.chosen,) if self.what.chosen is not None else ()
            case Bind():
                return tuple(binding.instance for binding in self.what.bindings)
            case Moving():
                return (self.what.move.destination,)
            case Releasing():
                return (self.what.source.instance,)

    def to_json(self) -> Mapping[str, object]:
        """All of it. `decision` can be read again and replayed (gateway/policy/decision.py)."""
        what = self.what
        decision: Decision = what.why if isinstance(what, Moving | Releasing) else what
        told: dict[str, object] = {"number": self.number, "at": self.at.isoformat(), "kind": what.kind}
        told |= {"requests": list(self.requests), "chosen": list(self.chosen)}
        match what:
            case Dispatch():
                told["alternatives"] = scores(what)
            case Bind():
                told["alternatives"] = bind_scores(what)
            case Releasing():
                told["source"] = _sums(what.source)
            case Moving():
                told |= {"source": _sums(what.source), "destination": _sums(what.destination)}
                told |= {"reason": what.reason.value, "gain_s": what.move.gain_s}
                if isinstance(what.why, Trade):
                    offered = [(source, move) for source, moves in what.why.answers for move in moves]
                    told["alternatives"] = [
                        {"source": source, "request": move.request, "destination": move.destination, "gain_s": move.gain_s}
                        for source, move in sorted(offered, key=lambda each: -each[1].gain_s)
                    ]
                else:
                    told["alternatives"] = [
                        {"source": pair.source, "destination": pair.destination, "reason": pair.reason.value} for pair in what.why.pairs
                    ]
        told["decision"] = to_json(decision)
        return told


class DecisionLog:
    """Owned by the app. The last `kept` decisions can be read; those of the `logged` kinds are lines of the log, too."""

    def __init__(self, kept: int, *, logged: Collection[str], metrics: Metrics) -> None:
        self._kept: deque[Noted] = deque(maxlen=kept)
        self._logged = logged
        self._metrics = metrics
        self._number = 0

    def note(self, what: Dispatch | Bind | Moving | Releasing, made: Sequence[InstanceId] | None = None) -> None:
        """It has been decided. Cheap: it is put into words when somebody wants to read it. `made`: what of it was carried out here."""
        self._number += 1
        noted = Noted(self._number, datetime.now(UTC), what)
        self._kept.append(noted)
        for instance in noted.chosen if made is None else made:
            self._metrics.note_decision(what.kind, instance)
        if what.kind in self._logged and log.isEnabledFor(logging.INFO):
            log.info("%s", json.dumps(noted.to_json(), separators=(",", ":")))

    def find(self, kind: str | None, request: str | None, limit: int) -> Sequence[Noted]:
        """The latest first; of that kind and about that request, if they are given."""
        found = (
            noted
            for noted in reversed(self._kept)
            if (kind is None or noted.what.kind == kind) and (request is None or request in noted.requests)
        )
        return [noted for noted, _ in zip(found, range(limit), strict=False)]


def _sums(standing: Standing) -> Mapping[str, object]:
    return {
        "instance": standing.instance,
        "freeness": round(standing.freeness, 3),
        "free_tokens": standing.free_tokens,
        "head_tokens": standing.head_tokens,
        "running": standing.running,
        "requests": standing.requests,
        "tokens": standing.tokens,
        "weight": round(standing.weight, 3),
    }
