"""Phase 11, a tiered prefix cache: blocks are also kept in a file, which is larger and survives a restart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.engine.requests import Phase
from common.startup.phases import lazy_names
from phase11_tiered.config import Config

if TYPE_CHECKING:
    from phase11_tiered.build import Pool, Runner, Scheduler, build_engine

__all__ = ["PHASE", "Config", "Pool", "Runner", "Scheduler", "build_engine"]

PHASE = Phase(11, "phase11_tiered", "Tiered prefix cache", "keep the blocks of prefixes in a file, too")

__getattr__ = lazy_names("phase11_tiered.build")
