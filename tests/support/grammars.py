"""Matchers whose masks are slow."""

from __future__ import annotations

import threading
import time
from typing import Any

import llguidance

from common.constrained.grammar import Matcher


class SlowBackend:
    """A matcher's backend whose masks take `mask_s` seconds of processor time, and then wait for `hold`."""

    def __init__(
        self, backend: llguidance.LLMatcher, mask_s: float, hold: threading.Event | None = None
    ) -> None:
        self._backend = backend
        self._mask_s = mask_s
        self._hold = hold

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
        end_s = time.thread_time() + self._mask_s
        while time.thread_time() < end_s:
            pass
        if self._hold is not None:
            self._hold.wait(60)
        self._backend.unsafe_compute_mask_ptr(pointer, size)


def slowed(matcher: Matcher, mask_s: float, hold: threading.Event | None = None) -> Matcher:
    matcher._backend = SlowBackend(matcher._backend, mask_s, hold)  # type: ignore[assignment]
    return matcher
