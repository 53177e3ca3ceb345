"""A replica: a phase's own app in a Ray actor."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from starlette.types import Message

from cluster.forwarding import GENERATING, Forwarded, body_of, call, collect
from cluster.policy import Load
from common.server.app import create_app
from common.server.logs import configure_logging
from common.server.options import ServerOptions
from common.server.run import new_engine
from common.server.service import Service
from common.startup.phases import build_engine, find_phase
from common.startup.process_memory import freeze_objects


class Replica:
    """Builds an engine and answers the requests that the front forwards.

    Serve calls `check_health`, `record_routing_stats` and `record_autoscaling_stats` by these names.

    Args:
        phase: the phase's number or name.
        config: the phase's options.
        options: the server's options (`CommonOptions`).
        created: when the cluster was started, in seconds since 1970. All replicas report it for their model.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, phase: str, config: dict[str, Any], options: dict[str, Any], created: int
    ) -> None:
        # The front checks keys and origins. The live view would show the steps of any one replica.
        server_options = ServerOptions(**{**options, "api_key": [], "cors_origin": [], "live_view": False})
        configure_logging(server_options.log_level, server_options.log_format)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        self._engine = new_engine(
            functools.partial(build_engine, phase, find_phase(phase).Config(**config)), server_options
        )
        await asyncio.to_thread(self._engine.build)
        name = serve.get_replica_context().replica_id.unique_id
        self._app = create_app(self._engine, server_options)
        self._service: Service = self._app.state.server
        self._service.created = created
        self._service.id_tag = f"{name}_"
        self._life = self._app.router.lifespan_context(self._app)
        await self._life.__aenter__()
        freeze_objects()
        self._name = name
        self._numbers = itertools.count()

    # ------------------------------------------------------------------ requests

    async def stream(self, request: Forwarded) -> AsyncIterator[str | list[Message]]:
        """Yield this replica's name at once, then the ASGI messages of its answer as they come.

        Raises:
            EngineDeadError: the engine died before the first byte of the answer's body. The front then asks another
                replica, even if the app has begun a stream.
        """
        yield self._name
        begun = False
        async with contextlib.aclosing(call(self._app, request)) as answer:
            async for ready in answer:
                if not begun and self._engine.dead is not None and request.path in GENERATING:
                    raise self._engine.dead
                begun = begun or any(map(body_of, ready))
                yield ready

    async def whole(self, request: Forwarded) -> tuple[str, Message, bytes]:
        """Return this replica's name and its whole answer."""
        return self._name, *await collect(self._app, request)

    # ------------------------------------------------------------------ called by Serve

    async def check_health(self) -> None:  # async, to run on the event loop
        """Check that this replica still computes. If the check raises, Serve replaces the replica.

        Raises:
            ApiError, EngineDeadError, RuntimeError: nothing will be computed here any more.
        """
        self._service.require_health()
        if not self._engine.process.running:
            raise RuntimeError("the engine's process has ended")

    def load(self) -> Load:
        engine, config = self._engine, self._engine.facts.config
        latest = engine.latest_step
        return Load(
            seats=config.max_batch_size,
            active=latest.active,
            waiting=engine.num_waiting(),
            queue_room=engine.queue_room(),
            kv_use=latest.kv_reserved_tokens / config.kv_tokens(),
        )

    def record_routing_stats(self) -> dict[str, Any]:
        """Return the load for routers, with a number: they see each report several times."""
        return {**dataclasses.asdict(self.load()), "number": next(self._numbers)}

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {"load": self.load().value}
