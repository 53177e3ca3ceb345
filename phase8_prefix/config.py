"""Options of prefix caching."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from phase7_chunked.config import Config as ChunkedConfig


class Config(ChunkedConfig):
    """Phase 7's options, and the switch for prefix caching."""

    enable_prefix_caching: bool = True
    """share computed blocks between requests; without it this phase works as phase 7"""

    @model_validator(mode="after")
    def _refuse_to_share_slots(self) -> Self:
        if self.enable_prefix_caching and self.kv_cache_backend == "contiguous":
            raise ValueError(
                "kv_cache_backend contiguous has no blocks to share: a slot is all of one sequence; use paged, "
                "or turn enable_prefix_caching off"
            )
        return self
