"""The llumlet as a layer in front of the engine's own OpenAI app: which request goes where."""

from starlette.types import Receive, Scope, Send

from backend.engine.base import Engine
from backend.llumlet.departure import serve_departing
from backend.llumlet.drain import Drain
from backend.llumlet.flights import Flights
from backend.llumlet.incoming import REQUEST_HEADER, header
from backend.llumlet.routes import PREFIX, Routes
from backend.llumlet.settings import LlumletSettings


class Llumlet:
    """Routes /midstream/* to its own handlers, requests of a gateway through a flight, everything else straight to the engine's app."""

    def __init__(self, engine: Engine, settings: LlumletSettings, *, flights: Flights, routes: Routes, drain: Drain) -> None:
        self._engine = engine
        self._settings = settings
        self._flights = flights
        self._routes = routes
        self._drain = drain
        self._app = engine.openai_app
        self._movable_paths = engine.movable_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"].startswith(PREFIX):
            await self._routes(scope, receive, send)
        elif scope["path"] not in self._movable_paths or scope["method"] != "POST" or header(scope, REQUEST_HEADER) is None:
            await self._app(scope, receive, send)
        elif self._drain.draining:
            await self._drain.refusal()(scope, receive, send)
        else:
            await serve_departing(scope, receive, send, engine=self._engine, flights=self._flights, settings=self._settings)
