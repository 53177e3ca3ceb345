"""Phase 8, prefix caching: requests with the same prefix share its blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.engine.requests import Phase
from common.startup.phases import lazy_names
from phase8_prefix.config import Config

if TYPE_CHECKING:
    from phase8_prefix.build import Pool, Runner, Scheduler, build_engine

__all__ = ["PHASE", "Config", "Pool", "Runner", "Scheduler", "build_engine"]

PHASE = Phase(8, "phase8_prefix", "Prefix caching", "share the blocks of a common prefix")

__getattr__ = lazy_names("phase8_prefix.build")
