"""Phase 5, continuous batching: admit and retire on every step, one cache slot per sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.engine.requests import Phase
from common.startup.phases import lazy_names
from phase5_continuous.config import Config

if TYPE_CHECKING:
    from phase5_continuous.build import Pool, Runner, Scheduler, build_engine

__all__ = ["PHASE", "Config", "Pool", "Runner", "Scheduler", "build_engine"]

PHASE = Phase(
    5,
    "phase5_continuous",
    "Continuous batching",
    "admit and retire on every step, one cache slot per sequence",
)

__getattr__ = lazy_names("phase5_continuous.build")
