"""Phase 7, chunked prefill: prompts prefilled in bounded chunks beside decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.engine.requests import Phase
from common.startup.phases import lazy_names
from phase7_chunked.config import Config

if TYPE_CHECKING:
    from phase7_chunked.build import Pool, Runner, Scheduler, build_engine

__all__ = ["PHASE", "Config", "Pool", "Runner", "Scheduler", "build_engine"]

PHASE = Phase(7, "phase7_chunked", "Chunked prefill", "prompts prefilled in bounded chunks beside decode")

__getattr__ = lazy_names("phase7_chunked.build")
