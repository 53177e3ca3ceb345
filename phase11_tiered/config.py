"""Options of the tiered prefix cache."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from phase10_speculative.config import Config as SpeculativeConfig


class Config(SpeculativeConfig):
    """Phase 10's options, and the file of the prefix cache."""

    kv_tier: Path | None = None
    """folder for a file with the blocks of the prefix cache, which are read from it also after a restart; default:
    none, and this phase is phase 10"""
    kv_tier_bytes: int = Field(default=4 * 2**30, ge=2**20)
    """size of that file in bytes"""

    @model_validator(mode="after")
    def _refuse_a_tier_below_nothing(self) -> Self:
        if self.kv_tier is not None and not self.enable_prefix_caching:
            raise ValueError("kv_tier keeps blocks of the prefix cache: turn enable_prefix_caching on, too")
        return self
