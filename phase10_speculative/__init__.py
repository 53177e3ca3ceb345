"""Phase 10, speculative decoding: guess the next tokens from the text so far, and verify them in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.engine.requests import Phase
from common.startup.phases import lazy_names
from phase10_speculative.config import Config

if TYPE_CHECKING:
    from phase10_speculative.build import Pool, Runner, Scheduler, build_engine

__all__ = ["PHASE", "Config", "Pool", "Runner", "Scheduler", "build_engine"]

PHASE = Phase(
    10, "phase10_speculative", "Speculative decoding", "guess the next tokens, and verify them in one pass"
)

__getattr__ = lazy_names("phase10_speculative.build")
