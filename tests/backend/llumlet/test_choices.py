"""What a llumlet offers to a rebalancer, and whose orders it takes."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from backend.engine.base import Engine
from backend.engine.flight import Flight, Replay
from backend.llumlet.choices import MAX_LOOKS, REST_S, Choices, longest_output
from backend.llumlet.flights import Flights
from backend.llumlet.migrations import Migrations
from backend.registry.instance import LoadReport, StepCost
from migration.choice import PriceRule, Standing
from migration.errors import RequestEnded
from migration.leg import InstanceId, Leg, RequestId
from migration.messages import HttpRequest, TokenStep
from migration.ports import Phase, Progress
from migration.question import Question, TierValue, Wanted
from tests.backend.llumlet.live import running_backend
from tests.backend.registry.reports import a_report

TIERS = (TierValue("normal", 1, 1.0), TierValue("high", 0, 10.0), TierValue("batch", 2, 0.2))


def standing(name: str, free: int, running: int = 1) -> Standing:
    return Standing(InstanceId(name), free, 0, running, running, 4000 - free, float(running))


def question(wanted: Wanted = Wanted.RELIEF, **fields: Any) -> Question:
    return replace(Question(5, wanted, standing("s", 10, 4), (standing("d", 3000),), TIERS), **fields)


@dataclass(eq=False)
class Seat:
    flight: Flight


class World:
    """Flights, phases and a clock as the test says; stands in for the engine, the flights and the migrations."""

    def __init__(self) -> None:
        self.choices: Choices | None = None
        self.seats: list[Seat] = []
        self.phases: dict[RequestId, Phase] = {}
        self.looks: list[RequestId] = []
        self.now_s = 100.0
        self.step_s = 0.0
        self.usual_s = 0.5
        self.moving: set[RequestId] = set()
        self.stayed: dict[RequestId, float] = {}

    def add(
        self, name: str, prompt: int, output: int = 3, *, tier: str = "normal", body: bytes = b"{}", phase: Phase | None = None
    ) -> Flight:
        flight = Flight(Leg(RequestId(name), 0), HttpRequest("/", (), body), tier=tier, prompt_tokens=prompt)
        flight.history = [TokenStep(1)] * output
        flight.engine_requests = [name]
        self.seats.append(Seat(flight))
        self.phases[flight.leg.request] = phase or (Phase.DECODE if output else Phase.WAITING)
        return flight

    async def offered(self, asked: Question) -> list[str]:
        self.choices = self.choices or Choices(cast("Engine", self), cast("Flights", self), cast("Migrations", self), lambda: self.now_s)
        return [move.request for move in (await self.choices.answer(asked)).moves]

    # the engine, the flights, the migrations

    def __iter__(self) -> Iterator[Seat]:
        return iter(self.seats)

    def latest(self, request: RequestId) -> Seat | None:
        return next((seat for seat in self.seats if seat.flight.leg.request == request), None)

    async def look(self, leg: Leg) -> Progress:
        self.looks.append(leg.request)
        if self.phases[leg.request] is Phase.PREFILL:
            raise RequestEnded
        return Progress(self.phases[leg.request], 0, 0, 0)

    def load(self) -> LoadReport:
        return a_report("s", cost=StepCost(last_step_s=self.step_s))

    def is_moving(self, request: RequestId) -> bool:
        return request in self.moving

    def stayed_since_s(self, request: RequestId) -> float:
        return self.stayed.get(request, float("-inf"))


@pytest.fixture
def world() -> World:
    return World()


async def test_the_least_urgent_and_shortest_is_offered_and_only_that_one_is_looked_at(world: World) -> None:
    world.add("urgent", 10, tier="high")
    world.add("long", 900)
    world.add("short", 300)
    assert await world.offered(question()) == ["short"]
    assert world.looks == ["short"]


async def test_unknown_tiers_are_the_first_one(world: World) -> None:
    world.add("unknown", 50, tier="gold")
    world.add("urgent", 10, tier="high")
    assert await world.offered(question()) == ["unknown"]


async def test_one_that_lost_its_memory_is_passed_over(world: World) -> None:
    world.add("preempted", 100, phase=Phase.WAITING)
    world.add("ended", 120, phase=Phase.PREFILL)
    world.add("runs", 300)
    assert await world.offered(question()) == ["runs"]


async def test_looks_are_bounded(world: World) -> None:
    for number in range(50):
        world.add(f"r{number}", 100 + number, phase=Phase.WAITING)
    assert await world.offered(question()) == []
    assert len(world.looks) <= 8


async def test_who_would_end_before_it_has_moved_stays(world: World) -> None:
    world.add("ends soon", 100, output=90, body=b'{"max_tokens": 100}')
    world.add("goes on", 200, output=3, body=b'{"max_tokens": 100}')
    assert await world.offered(question()) == ["ends soon"]  # no step was timed yet
    world.step_s = 0.02  # 25 tokens while it moves
    assert await world.offered(question()) == ["goes on"]


async def test_who_came_just_now_or_cannot_leave_stays(world: World) -> None:
    arrived = world.add("came", 10)
    arrived.owned_since_s = 99.0
    world.add("several", 20).engine_requests = ["a", "b"]
    world.add("unmovable", 30).unmovable = "n"
    world.add("moving", 40)
    world.moving.add(RequestId("moving"))
    world.add("arriving", 50).replay = Replay()
    world.add("tried", 60)
    world.stayed[RequestId("tried")] = 100.0
    assert await world.offered(question(cool_down_s=2.0)) == []
    world.now_s += REST_S + 0.1
    assert await world.offered(question(cool_down_s=2.0)) == ["came"]


async def test_a_requeue_takes_who_has_computed_nothing_then_the_latest_that_was_preempted(world: World) -> None:
    world.add("runs", 50)
    world.add("preempted", 80, phase=Phase.WAITING)
    world.add("new", 900, output=0)
    world.add("too long", 5000, output=0, tier="high")
    asked = question(Wanted.REQUEUE)
    assert await world.offered(asked) == ["new"]
    world.seats = world.seats[:2]
    assert await world.offered(asked) == ["preempted"]


async def test_a_release_offers_all_that_were_preempted_here_and_are_long_enough(world: World) -> None:
    world.add("runs", 500)
    world.add("preempted", 498, phase=Phase.WAITING)
    world.add("longer", 900, phase=Phase.WAITING)
    world.add("short", 496, phase=Phase.WAITING)
    world.add("new", 900, output=0)
    brought = world.add("brought", 900, phase=Phase.WAITING)
    brought.replay = Replay()
    brought.replay.extend(tuple(brought.history))
    brought.replay.finish()
    asked = question(Wanted.RELEASE, least_tokens=500)
    assert await world.offered(asked) == []
    assert not world.looks  # nobody is known to be quiet yet
    world.now_s += 0.1
    assert await world.offered(asked) == ["longer", "preempted"]
    brought.history.append(TokenStep(2))
    assert "brought" not in await world.offered(asked)
    world.now_s += 0.1
    assert "brought" in await world.offered(asked)


async def test_the_engine_is_not_asked_about_those_that_have_tokens_and_about_few_at_a_time(world: World) -> None:
    running = [world.add(f"runs {number}", 500) for number in range(30)]
    world.add("preempted", 500, phase=Phase.WAITING)
    world.step_s = 0.06
    asked = question(Wanted.RELEASE)
    for _ in range(4):
        world.now_s += 0.05
        for flight in running:
            flight.history.append(TokenStep(1))
        offered = await world.offered(asked)
    assert offered == ["preempted"]
    assert set(world.looks) == {"preempted"}
    world.looks.clear()
    world.now_s += 10.0  # a step that took long: all are quiet
    assert await world.offered(asked) == ["preempted"]
    assert len(world.looks) == MAX_LOOKS


async def test_a_trade_offers_one_move_for_each_destination_that_gains(world: World) -> None:
    world.add("long", 2000)
    world.add("short", 50)
    rule = PriceRule(3.5e-6, 0.15e-3, 0.001, 10)
    asked = question(
        Wanted.TRADE,
        source=Standing(InstanceId("s"), 100, 0, 40, 40, 8000, 40.0),
        destinations=(standing("d", 3000), standing("full", 0, 40)),
        rule=rule,
    )
    assert await world.offered(asked) == ["long"]


def test_the_bound_on_the_output() -> None:
    assert longest_output(b'{"max_tokens": 7}') == 7
    assert longest_output(b'{"max_tokens": 7, "max_completion_tokens": 5}') == 5
    for body in (b"{", b"[]", b"{}", b'{"max_tokens": null}', b'{"max_tokens": true}', b'{"max_tokens": "7"}'):
        assert longest_output(body) is None


async def test_orders_of_a_lease_that_was_lost_are_refused() -> None:
    async with running_backend() as backend:

        async def post(what: str, body: object) -> tuple[int, dict[str, Any]]:
            answer = await backend.client.post(f"{backend.url}/midstream/{what}", json=body)
            return answer.status_code, answer.json()

        plan = {"request": "R", "destination": {"instance": "i2", "url": "http://i2"}}
        assert await post("choices", question().to_json()) == (200, {"moves": []})
        assert await post("fence", {"token": 7}) == (200, {"token": 7})
        for what, body in (("choices", question().to_json()), ("fence", {"token": 6}), ("migrations", {**plan, "token": 6})):
            status, answer = await post(what, body)
            assert (status, answer["error"]["code"], answer["error"]["type"]) == (409, "stale_token", "invalid_request_error")
        assert (await post("migrations", {**plan, "token": 7}))[1]["error"]["code"] == "request_not_found"
        assert (await post("migrations", plan))[0] == 404  # a person's order has no token
        for what, body in (
            ("fence", {}),
            ("fence", []),
            ("fence", {"token": True}),
            ("choices", {}),
            ("migrations", {**plan, "token": "7"}),
        ):
            assert (await post(what, body))[0] == 400


def test_a_question_survives_its_json_and_nonsense_does_not() -> None:
    asked = question(Wanted.TRADE, rule=PriceRule(1e-6, 1e-4, 0.005, 160), cool_down_s=1.0)
    assert Question.from_json(asked.to_json()) == asked
    for nonsense in (
        None,
        {},
        replace(asked, tiers=()).to_json(),
        replace(asked, destinations=()).to_json(),
        replace(asked, token=-1).to_json(),
    ):
        with pytest.raises(ValueError, match=r".+"):
            Question.from_json(nonsense)


async def test_a_waiting_request_that_has_started_stays() -> None:
    """Ordered to move because it waits, and then it has memory: see tests/migration for the session."""
    async with running_backend() as backend, asyncio.timeout(10):

        async def look(leg: Leg) -> Progress:
            return Progress(Phase.DECODE, 5, 1, 5)

        backend.engine.look = look  # type: ignore[method-assign]
        async with backend.chat() as reader:
            await reader.next()
            plan = {"request": "R", "destination": {"instance": "i2", "url": "http://127.0.0.1:9"}, "token": 1, "only_waiting": True}
            answer = (await backend.client.post(f"{backend.url}/midstream/migrations", json=plan)).json()
            assert (answer["result"], answer["reason"]) == ("unmovable", "started")
