"""Every ten seconds: a line in the log while the server has work, and freed memory goes to the operating system.

The line says how much work there is, how fast it goes, and how full the KV memory is.
"""

from __future__ import annotations

import asyncio
import logging
import time

from common.engine import Engine
from common.memory import return_freed_memory
from common.server.log_format import FIELDS
from common.worker import EngineWorker

logger = logging.getLogger(__name__)

EVERY_S = 10.0


class Pulse:
    """Logs what a server does, from the event loop, and returns freed memory. An idle server logs nothing.

    Rates are of the time since the line before, or since the server became busy.
    """

    def __init__(self, engine: Engine, worker: EngineWorker) -> None:
        self._engine = engine
        self._worker = worker
        self._remember()

    async def run(self) -> None:
        """Log and return memory until cancelled."""
        while True:
            await asyncio.to_thread(return_freed_memory)
            await asyncio.sleep(EVERY_S)
            self.beat()

    def beat(self) -> None:
        """Log one line, if requests are running or waiting."""
        latest, waiting = self._engine.telemetry.latest, self._worker.num_waiting()
        if latest.active or waiting:
            seconds = time.monotonic() - self._since_s
            new = (self._worker.requests.generation_tokens - self._new_tokens) / seconds
            prompt = (self._engine.telemetry.counters.prefill_tokens - self._prompt_tokens) / seconds
            kv_use = latest.kv_reserved_tokens / self._engine.config.kv_tokens()
            step_s = self._worker.step_s
            logger.info(
                "%d running, %d waiting; %.1f new and %.1f prompt tokens/s; %.0f %% of the KV memory held%s",
                latest.active,
                waiting,
                new,
                prompt,
                100 * kv_use,
                f"; the present step has taken {step_s:.0f} s" if step_s > EVERY_S else "",
                extra={
                    FIELDS: {
                        "running": latest.active,
                        "waiting": waiting,
                        "new_tokens_per_s": new,
                        "prompt_tokens_per_s": prompt,
                        "kv_use": kv_use,
                        "step_s": step_s,
                    }
                },
            )
        self._remember()

    def _remember(self) -> None:
        self._since_s = time.monotonic()
        self._new_tokens = self._worker.requests.generation_tokens
        self._prompt_tokens = self._engine.telemetry.counters.prefill_tokens
