"""Phase 9, pipelined decoding: the next step computes while the host reads the last one's tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.engine.requests import Phase
from common.startup.phases import lazy_names
from phase9_pipelined.config import Config

if TYPE_CHECKING:
    from phase9_pipelined.build import Pool, Runner, Scheduler, build_engine

__all__ = ["PHASE", "Config", "Pool", "Runner", "Scheduler", "build_engine"]

PHASE = Phase(
    9,
    "phase9_pipelined",
    "Pipelined decoding",
    "launch the next step before the previous step's tokens are read",
)

__getattr__ = lazy_names("phase9_pipelined.build")
