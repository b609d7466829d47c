"""What a llumlet needs of an engine. Two implementations: vLLM, and the modelled engine behind `--engine fake`."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from starlette.types import ASGIApp

from backend.engine.flight import Flight
from backend.registry.instance import LoadReport
from migration.leg import Leg
from migration.ports import DestinationEngine, SourceEngine


class Engine(SourceEngine, DestinationEngine, Protocol):
    """An engine with its own OpenAI server app, able to give requests away and to take them in."""

    @property
    def openai_app(self) -> ASGIApp:
        """The engine's own OpenAI-compatible server, complete: every route of it stays available."""

    @property
    def movable_paths(self) -> frozenset[str]:
        """Paths whose requests can be moved (replay is exact), e.g. '/v1/chat/completions'."""

    def open_flight(self, flight: Flight) -> AbstractAsyncContextManager[None]:
        """Know this flight while it lasts. On leaving, whatever the engine still runs for it is aborted and its memory freed.

        What of it can be told before its request is read is told on entering: `names_are_drawn`, and `unmovable` for what is stored here.
        """

    def flight(self, leg: Leg) -> Flight | None:
        """The open flight of that leg, if it is here."""

    def load(self) -> LoadReport:
        """The load right now; instance id, url and state are filled in by the llumlet (dataclasses.replace)."""

    def watch_load(self, changed: Callable[[bool], None]) -> None:
        """Call `changed(urgent)` whenever load() would answer differently; urgent when memory was freed, or a request started, finished
        or was preempted."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """The engine's life, with the lifespan of its app: entered before the first request, left last."""
