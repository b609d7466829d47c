"""Long prompts among short ones that keep every instance busy: they start, and not much later than `age_step_s` says."""

from dataclasses import dataclass, field, replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.policy.line import Binding, LateBinding, LineView, Waiting
from gateway.policy.view import InstanceView
from migration.leg import RequestId
from tests.gateway.policy.views import cluster, instance, request

CAPACITY = 1600
LONG, SHORT = 1300, 150
TICK_S = 0.25


@dataclass
class Engine:
    """Starts what is bound to it in order of arrival, as soon as it fits."""

    name: str
    queue: list[tuple[str, int]] = field(default_factory=list)
    running: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Tokens, and when it ends."""

    def view(self) -> InstanceView:
        held = sum(tokens for tokens, _ in self.running.values())
        return instance(self.name, held=held, running=len(self.running), waiting=tuple(t for _, t in self.queue), capacity=CAPACITY)

    def step(self, now_s: float, rng: Random) -> list[str]:
        """Ends what ends, starts what fits; says what has started."""
        self.running = {name: (tokens, end_s) for name, (tokens, end_s) in self.running.items() if end_s > now_s}
        started = []
        while self.queue and sum(tokens for tokens, _ in self.running.values()) + self.queue[0][1] <= CAPACITY - 160:
            name, tokens = self.queue.pop(0)
            self.running[name] = (tokens, now_s + 0.5 + 2 * rng.random())
            started.append(name)
        return started


@dataclass
class Play:
    policy: LateBinding
    rng: Random
    engines: list[Engine]
    line: list[Waiting] = field(default_factory=list)
    ahead: set[str] = field(default_factory=set)
    started_s: dict[str, float] = field(default_factory=dict)

    def tick(self, now_s: float) -> None:
        for engine in self.engines:
            for name in engine.step(now_s, self.rng):
                self.started_s[name] = now_s
                self.ahead.discard(name)
        while True:
            view = LineView(tuple(self.line), now_s, len(self.ahead))
            bindings = self.policy.bind(view, cluster(*(engine.view() for engine in self.engines)), self.rng)
            if not bindings:
                return
            for binding in bindings:
                self.carry_out(binding, now_s)

    def carry_out(self, binding: Binding, now_s: float) -> None:
        waiting = next(each for each in self.line if each.view.request == binding.request)
        self.line.remove(waiting)
        engine = next(engine for engine in self.engines if engine.name == binding.instance)
        engine.queue.append((binding.request, waiting.tokens))
        if binding.ahead:
            self.ahead.add(binding.request)
        for name in engine.step(now_s, self.rng):
            self.started_s[name] = now_s
            self.ahead.discard(name)


def arrive(name: str, tokens: int, at_s: float) -> Waiting:
    return Waiting(replace(request(name, tokens), request=RequestId(name)), tokens, at_s)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(2, 5), st.sampled_from([0, 2]), st.integers(1, 3))
def test_a_long_prompt_starts_soon_once_it_is_old(seed: int, engines: int, ahead: int, longs: int) -> None:
    """Whether heads may be bound ahead at once or only once they are old; with more load than the instances can take."""
    play = Play(
        LateBinding(placement="freeness", ahead=ahead, age_step_s=10.0, aged_share=0.5),
        Random(seed),
        [Engine(f"i{n}") for n in range(engines)],
    )
    count = 0
    for step in range(int(60 / TICK_S)):
        now_s = step * TICK_S
        if step == 20:
            play.line += [arrive(f"long{n}", LONG, now_s) for n in range(longs)]
        while len([each for each in play.line if each.tokens == SHORT]) < 4 * engines:
            play.line.append(arrive(f"short{count}", SHORT, now_s))
            count += 1
        play.tick(now_s)
    waited_s = [play.started_s[f"long{n}"] - 20 * TICK_S for n in range(longs)]
    # An instance that is closed runs empty within the longest short answer (2.5 s); each long one may have to wait for one before it.
    assert max(waited_s) <= (play.policy.age_step_s if not ahead else 0) + longs * 2 * (2.5 + TICK_S) + (0 if ahead else TICK_S)
    assert sum(name.startswith("short") for name in play.started_s) > 60  # and the others went on meanwhile
