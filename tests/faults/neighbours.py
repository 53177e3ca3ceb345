"""Neighbours: requests that are served beside a fault, and must not be affected."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tests.server.support import HANG_S, LocalServer, eventually, texts

PROMPTS = ("Once upon a time", "The brave fox")
TOKENS = 32


class Neighbours:
    """Two streams of known text.

    Args:
        served: their server, which must be idle now.
    """

    def __init__(self, served: LocalServer) -> None:
        self.served = served
        self._alone = [served.complete(**self._wanted(prompt))["choices"][0]["text"] for prompt in PROMPTS]
        self._reading: list[Future[str]] = []
        self._pool = ThreadPoolExecutor(len(PROMPTS))

    def _wanted(self, prompt: str) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True}

    def begin(self) -> None:
        """Start both streams, and wait until each has a token. In phase 4 no request joins them after that."""
        begun = threading.Barrier(len(PROMPTS) + 1)
        self._reading = [self._pool.submit(self._read, prompt, begun) for prompt in PROMPTS]
        begun.wait(HANG_S)

    def _read(self, prompt: str, begun: threading.Barrier) -> str:
        with self.served.streaming(**self._wanted(prompt)) as events:
            first = next(events)
            begun.wait(HANG_S)
            return texts([first, *events])[0]

    def end(self) -> None:
        """Check both texts, that no place or memory is held, and that the next request gets the right text."""
        assert [each.result(HANG_S) for each in self._reading] == self._alone
        eventually(lambda: self.served.worker.num_waiting() == 0)
        again = self.served.complete(**self._wanted(PROMPTS[0]))
        assert again["choices"][0]["text"] == self._alone[0]
        eventually(self._all_have_ended)
        # The request that ended last gives its memory back only in the next step.
        assert len(self.served.engine.scheduler.active) <= 1
        assert self.served.counters()["reclaimed_slots"] == 0, "memory was lost, and found by the audit"
        assert self.served.client.get("/health").status_code == 200

    def _all_have_ended(self) -> bool:
        counters = self.served.counters()
        ended = sum(counters[f"requests_{end}"] for end in ("finished", "failed", "cancelled"))
        return bool(counters["requests_added"] == ended)
