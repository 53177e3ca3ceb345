"""Phase 6, paged attention: KV memory in small blocks, allocated as sequences grow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.engine.requests import Phase
from common.startup.phases import lazy_names
from phase6_paged.config import Config

if TYPE_CHECKING:
    from phase6_paged.build import Pool, Runner, Scheduler, build_engine

__all__ = ["PHASE", "Config", "Pool", "Runner", "Scheduler", "build_engine"]

PHASE = Phase(6, "phase6_paged", "Paged attention", "KV memory in small blocks, allocated as sequences grow")

__getattr__ = lazy_names("phase6_paged.build")
