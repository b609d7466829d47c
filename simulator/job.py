"""One request's life in a simulation: where it stands now, and what happened to it."""

from dataclasses import dataclass, field

from backend.engine.request import EngineRequest
from gateway.policy.line import Waiting
from migration.leg import InstanceId, RequestId
from simulator.workload import Arrival


@dataclass(eq=False, slots=True)
class Job:
    """Written by the cluster it is in. Times are virtual seconds; None: not yet."""

    id: RequestId
    arrival: Arrival
    rank: int
    waiting: Waiting
    engine_request: EngineRequest
    place: InstanceId | None = None
    is_ahead: bool = False
    first_token_s: float | None = None
    finish_s: float | None = None
    lost_since_s: float | None = None
    """Preempted then, and not yet back where it was."""
    lost_s: float = 0.0
    preemptions: int = 0
    migrations: int = 0
    moved_s: float = field(default=float("-inf"))

    @property
    def tokens(self) -> int:
        """Context so far."""
        return self.arrival.prompt_tokens + self.engine_request.output_tokens
