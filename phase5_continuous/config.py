"""Options of continuous batching."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from phase4_static.config import Config as StaticConfig


class Config(StaticConfig):
    """Phase 4's options, less the waiting, and how newcomers are prefilled."""

    batch_wait_timeout_s: float = Field(
        default=0.0, ge=0.0, le=0.0, description="always 0: here nobody waits for a batch to fill"
    )
    prefill_newcomers: Literal["together", "one_by_one"] = Field(
        default="together",
        description="one pass over all newcomers' tokens, or a pass each (slower; to measure the difference)",
    )
