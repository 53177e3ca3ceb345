"""The ASGI app around an engine of any phase: middleware, routes, error handlers, start-up and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware

from common.hosting.async_engine import AsyncEngine
from common.server import state
from common.server.api import chat, completions, messages, responses, tokens
from common.server.api.bodies import Bodies
from common.server.errors import HANDLERS
from common.server.http.middleware import (
    AllowedHosts,
    AnswerErrors,
    ApiKeys,
    CountAnswers,
    OwnPages,
    RequestIds,
    RootPath,
    cors_settings,
)
from common.server.logs import Pulse
from common.server.metrics import Metrics
from common.server.openapi import openapi_document
from common.server.service import Service, served_model_name
from common.text.dialect import Dialect, ReasoningParser, ToolCallParser
from common.version import project_version

if TYPE_CHECKING:
    from common.engine.engine import Engine

LAST_STEP_S = 5.0  # most seconds that shutdown waits for the present step, whose clients have been answered


def create_app(
    engine: AsyncEngine | Engine,
    *,
    model_name: str | None = None,
    other_names: Sequence[str] = (),
    api_keys: Sequence[str] = (),
    cors_origins: Sequence[str] = (),
    hosts: AllowedHosts | None = None,
    root_path: str = "",
    body_timeout_s: float = 30.0,
    step_timeout_s: float | None = None,
    ping_s: float = 15.0,
    live_view: bool = True,
    admin: bool = False,
    tool_call_parser: ToolCallParser = "auto",
    reasoning_parser: ReasoningParser = "auto",
    strict_fields: bool = False,
    max_stored_responses: int = 1024,
    id_tag: str = "",
) -> FastAPI:
    """Return the ASGI app that serves an engine. The app starts the engine and stops it at shutdown.

    Args:
        engine: an engine that was built, in a process of its own. Or an engine of this process, in a test or a
            notebook.
        model_name: the model's name for clients; by default the name it was loaded by (a folder's last part).
        other_names: further names of the model.
        api_keys: clients must send one of these keys, except to `middleware.OPEN_PATHS`; empty: no key is needed.
        cors_origins: sites whose pages may use this app in a browser, beside its own page.
        hosts: the `Host` names that are allowed; checked only if there are no API keys. None: every name is
            allowed, and so are requests from pages of other sites. Use None if no browser can reach the app.
        root_path: prefix that a proxy puts before every path.
        body_timeout_s: most seconds from a request's head to the end of its body (see `Bodies`).
        step_timeout_s: if the engine spends more seconds than this in one step, `/health` answers 503; None: no
            limit.
        ping_s: seconds between the pings of a stream (comments that keep idle connections open).
        live_view: whether clients can watch the engine's steps (`GET /steps`).
        admin: whether clients may pause the engine (`POST /pause`, `POST /resume`).
        tool_call_parser, reasoning_parser: how tool calls and thoughts are found in answers (`Dialect.of`).
        strict_fields: whether unknown fields of a request's body are refused instead of ignored.
        max_stored_responses: most responses that are kept for later requests; 0: none.
        id_tag: part of the ids of answers (`Service`).
    """
    if not isinstance(engine, AsyncEngine):
        from common.hosting.local import LocalEngine  # with torch, which a server's process does not need

        engine = LocalEngine(engine)
    service = Service(
        engine,
        (model_name or served_model_name(engine.facts.config.model), *other_names),
        bodies=Bodies(body_timeout_s),
        step_timeout_s=step_timeout_s,
        ping_s=ping_s,
        live_view=live_view,
        dialect=Dialect.of(engine.maker.tokenizer, tool_call_parser, reasoning_parser),
        strict_fields=strict_fields,
        max_stored_responses=max_stored_responses,
        id_tag=id_tag,
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        pulse = asyncio.create_task(Pulse(engine).run())
        yield
        pulse.cancel()
        # Not in a `finally`: a cancelled shutdown must not wait for a forward pass.
        engine.maker.grammars.close()
        await engine.stop(LAST_STEP_S)

    app = FastAPI(
        title=f"infer: {engine.facts.phase.title.lower()}",
        summary=engine.facts.phase.idea,
        version=project_version(),
        lifespan=lifespan,
        docs_url=None,  # FastAPI's page loads scripts from another host
        redoc_url=None,
        servers=[{"url": root_path}] if root_path else None,
        redirect_slashes=False,
        exception_handlers=HANDLERS,
    )
    app.state.server = service
    app.state.metrics = Metrics(service)
    app.state.paths = []  # paths of all routes, to suggest one for a mistyped path
    for router in (
        completions.router,
        chat.router,
        responses.router,
        messages.router,
        tokens.router,
        state.router,
        *([state.admin_router] if admin else []),
    ):
        app.include_router(router)
        for route in router.routes:
            assert isinstance(route, APIRoute), "the routers have no routes of other kinds"
            app.state.paths.append(route.path)
            if "GET" in (route.methods or ()):
                app.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)
    app.add_middleware(AnswerErrors)
    if api_keys:
        app.add_middleware(ApiKeys, keys=api_keys)
    elif hosts is not None:
        app.add_middleware(OwnPages, hosts=hosts, origins=cors_origins)
    app.add_middleware(RequestIds)  # outside of both guards, so that their refusals have an id, too
    if cors_origins:
        app.add_middleware(  # outside of the key check: pages may read refusals, and a preflight request has no key
            CORSMiddleware, **cors_settings(cors_origins)
        )
    if root_path:
        app.add_middleware(RootPath, root_path=root_path)
    app.add_middleware(CountAnswers, counts=service.answers)
    app.openapi = lambda: openapi_document(app)  # type: ignore[method-assign]  # FastAPI's way to extend it
    return app
