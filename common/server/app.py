"""The app: routes, errors and life of the server, put around an engine. The same for every phase."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import AsyncIterator, Sequence

from fastapi import FastAPI
from fastapi.routing import APIRoute

from common.engine import Engine
from common.server.errors import HANDLERS
from common.server.middleware import ApiKeys, HeadAsGet, RequestIds
from common.server.openapi import openapi_document
from common.server.routes import generation, models, operation, tokens, tracing
from common.server.service import Service, served_model_name
from common.worker import EngineWorker

LAST_STEP_S = 5.0  # how long the end waits for a step whose clients have all been answered


def create_app(
    engine: Engine,
    *,
    worker: EngineWorker | None = None,
    model_name: str | None = None,
    other_names: Sequence[str] = (),
    api_keys: Sequence[str] = (),
    ping_s: float = 15.0,
    send_timeout_s: float = 60.0,
) -> FastAPI:
    """The app around an engine, which it owns from start-up to shutdown.

    Args:
        engine: of any phase.
        worker: whose thread built the engine; by default a new one, which takes the engine as it is.
        model_name: what clients call the model; by default the name it was loaded by (a folder's last part).
        other_names: what they may call it as well.
        api_keys: of which clients must send one; none: everybody is answered.
        ping_s: seconds between comments in a quiet stream.
        send_timeout_s: a client that takes nothing of its stream for so long is dropped.
    """
    service = Service(
        engine,
        worker or EngineWorker(lambda: engine),
        (model_name or served_model_name(engine.config.model), *other_names),
        ping_s=ping_s,
        send_timeout_s=send_timeout_s,
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        yield
        # Not in a `finally`: who cancels this is in a hurry, and a pass may be long.
        await service.worker.stop(LAST_STEP_S)

    app = FastAPI(
        title=f"infer: {engine.phase.title.lower()}",
        summary=engine.phase.idea,
        version=importlib.metadata.version("infer-phases"),
        lifespan=lifespan,
        docs_url=None,  # its pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers=HANDLERS,
    )
    app.state.server = service
    app.state.paths = []  # of all routes, for who has mistyped one
    for family in (generation, tokens, models, operation, tracing):
        app.include_router(family.router)
        app.state.paths += [route.path for route in family.router.routes if isinstance(route, APIRoute)]
    if api_keys:
        app.add_middleware(ApiKeys, keys=api_keys)
    app.add_middleware(HeadAsGet)
    app.add_middleware(RequestIds)  # the outermost: refusals of the others have their id, too
    app.openapi = lambda: openapi_document(app, engine, service.limits)  # type: ignore[method-assign]  # FastAPI's way to extend it
    return app
