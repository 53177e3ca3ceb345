"""Options of continuous batching."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from common.config import EngineConfig


class Config(EngineConfig):
    """The base options, and how newcomers are prefilled. Nobody waits for a batch to fill."""

    prefill_newcomers: Literal["together", "one_by_one"] = Field(
        default="together",
        description="one pass over all newcomers' tokens, or a pass each (slower; to measure the difference)",
    )
