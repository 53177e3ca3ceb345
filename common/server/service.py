"""What the routes share: the engine behind them, its worker, and under which name it is served."""

from __future__ import annotations

import time
from pathlib import Path

from starlette.requests import Request

from common.engine import Engine
from common.server.backlogs import Backlogs
from common.server.bodies import Bodies
from common.server.intake import Intake
from common.server.live_view import LiveView
from common.server.page import render_page
from common.server.schemas.parsing import Limits
from common.trace import Tracer
from common.worker import EngineWorker


class Service:
    """One engine, served.

    Attributes:
        model_name: what it calls its model.
        created: when it began, in seconds since 1970.
        bodies: reads what clients send.
        backlogs: what clients have not taken of what they are sent.
        ping_s: seconds between comments in a quiet stream.
        live_view: the engine's steps, for those who look; None: nobody may.
        tracer: the engine's, to be called in its thread (`EngineWorker.call`).
    """

    def __init__(
        self,
        engine: Engine,
        worker: EngineWorker,
        model_names: tuple[str, ...],
        *,
        bodies: Bodies,
        backlogs: Backlogs,
        ping_s: float,
        live_view: bool,
    ) -> None:
        self.engine = engine
        self.worker = worker
        self.model_name = model_names[0]
        self.bodies = bodies
        self.backlogs = backlogs
        self.ping_s = ping_s
        self.created = int(time.time())
        self.limits = Limits(
            models=model_names,
            max_choices=engine.config.max_waiting_requests,
            vocab_size=engine.runner.model.config.vocab_size,
        )
        self.intake = Intake(engine, worker)
        self.live_view = LiveView(worker) if live_view else None
        self.page = render_page(engine, self.model_name, live_view=live_view)
        self.tracer = Tracer(engine)


def service_of(request: Request) -> Service:
    """The one that a request came to."""
    service: Service = request.app.state.server
    return service


def served_model_name(model: str) -> str:
    """A checkpoint's folder stays ours; its last part is name enough."""
    path = Path(model)
    return path.resolve().name if path.is_dir() else model
