"""The objects that all routes share: the engine, and a `Service` around it."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

from fastapi import Depends
from starlette.requests import Request

from common.engine.requests import EngineFacts
from common.errors import EngineDeadError
from common.hosting.async_engine import AsyncEngine
from common.server.api.bodies import Body, Limits
from common.server.api.intake import Intake
from common.server.api.lanes import Admission
from common.server.api.response_items import ResponseStore
from common.server.api.tools import log_once
from common.server.errors import unavailable
from common.server.options import ServerOptions
from common.server.page.live_view import LiveView, Recordings
from common.server.page.page import render_page
from common.text.dialect import Dialect
from common.version import project_version


class Service:
    """Holds one engine and the other objects that all routes share."""

    def __init__(self, engine: AsyncEngine, options: ServerOptions) -> None:
        facts = engine.facts
        names = options.served_model_name or [served_model_name(facts.config.model)]
        self.engine = engine
        self.created = int(time.time())  # the server's start
        self.model_name = names[0]  # in answers
        self.fingerprint = fingerprint_of(facts, self.model_name)
        self.id_tag = ""  # part of the ids of answers: the front of a cluster finds the replica by it
        self.answers = Counter[tuple[int, str]]()  # number of HTTP answers by status and error code
        self.body_timeout_s = options.body_timeout
        self.limits = Limits(
            models=tuple(names),
            max_choices=facts.config.max_waiting_requests,
            vocab_size=facts.vocab_size,
            strict_fields=options.strict_fields,
        )
        self.dialect = Dialect.of(engine.maker.tokenizer, options.tool_call_parser, options.reasoning_parser)
        self.stored = ResponseStore(options.max_stored_responses)
        self.admission = Admission()
        self.intake = Intake(engine, self.admission, self.limits, self.dialect)
        self.live_view = LiveView(engine) if options.live_view else None
        self.page = render_page(
            engine, self.model_name, live_view=options.live_view, root_path=options.root_path
        )
        self.recordings = Recordings(engine)
        self._step_timeout_s = options.step_timeout

    def note_ignored(self, request: Request, body: Body) -> None:
        """Name the unknown fields of a body in the answer's header `x-infer-ignored`, and once in the log."""
        if body.ignored:
            request.state.ignored = ",".join(body.ignored.values())
            log_once(f"unknown fields are ignored: {', '.join(body.ignored)}")

    def require_health(self) -> None:
        """Check that the engine works: if not, only a new process helps.

        Raises:
            EngineDeadError: the engine is dead.
            ApiError: 503, the engine has been in one step, or has taken no request, for too long.
        """
        if self.engine.dead is not None:
            raise EngineDeadError("the engine is dead; restart the server")
        step_s = self.engine.step_s
        if self._step_timeout_s is not None and step_s > self._step_timeout_s:
            raise unavailable(
                f"the engine has not answered for {step_s:.0f} s, over --step-timeout {self._step_timeout_s:g}; "
                "restart the server",
                code="engine_stuck",
                retry_after_s=30,
            )


def fingerprint_of(facts: EngineFacts, model_name: str) -> str:
    """Return the `system_fingerprint` of answers: a digest of version, phase, model name and dtypes."""
    named = (project_version(), facts.phase.slug, model_name, facts.dtype, facts.weight_dtype)
    return f"fp_{hashlib.sha256(repr(named).encode()).hexdigest()[:12]}"


async def service_of(request: Request) -> Service:
    """Return the service of the app that a request came to."""
    service: Service = request.app.state.server
    return service


#: Argument of a route: the service of its app.
Served = Annotated[Service, Depends(service_of)]


def served_model_name(model: str) -> str:
    """Return a model's name for clients. For a checkpoint folder this is only the last part of its path."""
    path = Path(model)
    return path.resolve().name if path.is_dir() else model
