"""Phase 4, static batching: fixed batches, padded to a rectangle, run until their last request is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.engine.requests import Phase
from common.startup.phases import lazy_names
from phase4_static.config import Config

if TYPE_CHECKING:
    from phase4_static.build import Pool, Runner, Scheduler, build_engine

__all__ = ["PHASE", "Config", "Pool", "Runner", "Scheduler", "build_engine"]

PHASE = Phase(4, "phase4_static", "Static batching", "fixed batches, padded to a rectangle")

__getattr__ = lazy_names("phase4_static.build")
