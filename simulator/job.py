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
    came_with_tokens: int = 0
    """Of its answer, to the instance where it is."""
    moved_s: float = field(default=float("-inf"))

    @property
    def ran_here(self) -> bool:
        """It has had tokens at the instance where it is."""
        return self.engine_request.output_tokens > self.came_with_tokens

    @property
    def tokens(self) -> int:
        """Context so far."""
        return self.arrival.prompt_tokens + self.engine_request.output_tokens
