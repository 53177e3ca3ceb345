"""The ASGI app around an engine of any phase: middleware, routes, error handlers, start-up and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware

from common.hosting.async_engine import AsyncEngine
from common.server import state
from common.server.api import chat, completions, messages, responses, tokens
from common.server.errors import HANDLERS
from common.server.http.middleware import (
    AllowedHosts,
    Answers,
    ApiKeys,
    OwnPages,
    RootPath,
    TooMany,
    cors_settings,
)
from common.server.logs import Pulse
from common.server.metrics import Metrics
from common.server.options import ServerOptions
from common.server.routes import openapi_document
from common.server.service import Service
from common.version import project_version

LAST_STEP_S = 5.0  # most seconds that shutdown waits for the present step, whose clients have been answered


def create_app(
    engine: AsyncEngine, options: ServerOptions | None = None, hosts: AllowedHosts | None = None
) -> FastAPI:
    """Return the ASGI app that serves an engine. The app starts the engine and stops it at shutdown.

    Args:
        engine: an engine that was built; a `LocalEngine` to look into it, in a test or a notebook.
        options: the server's options; None: the defaults.
        hosts: the `Host` names that are allowed; checked only if there are no API keys. None: every name is
            allowed, and so are requests from pages of other sites. Use None if no browser can reach the app.
    """
    if options is None:
        options = ServerOptions()
    service = Service(engine, options)

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
        servers=[{"url": options.root_path}] if options.root_path else None,
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
        *([state.admin_router] if options.admin else []),
    ):
        app.include_router(router)
        for route in router.routes:
            assert isinstance(route, APIRoute), "the routers have no routes of other kinds"
            app.state.paths.append(route.path)
            if "GET" in (route.methods or ()):
                app.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)
    if options.api_key:
        app.add_middleware(ApiKeys, keys=options.api_key)
    elif hosts is not None:
        app.add_middleware(OwnPages, hosts=hosts, origins=options.cors_origin)
    app.add_middleware(TooMany)
    app.add_middleware(Answers, counts=service.answers)  # outside of the guards, whose refusals get ids
    if options.cors_origin:
        app.add_middleware(  # outside of the key check: pages may read refusals, and a preflight request has no key
            CORSMiddleware, **cors_settings(options.cors_origin)
        )
    if options.root_path:
        app.add_middleware(RootPath, root_path=options.root_path)
    app.openapi = lambda: openapi_document(app)  # type: ignore[method-assign]  # FastAPI's way to extend it
    return app
