"""Options of pipelined decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from common.graphs import graph_sizes
from phase8_prefix.config import Config as PrefixConfig


class Config(PrefixConfig):
    """Phase 8's options, how far steps run ahead of their results, and how passes are computed."""

    pipeline_depth: int = Field(
        default=2,
        ge=0,
        le=2,
        description="steps in flight: 2; or 1, whose tokens are read before the next are chosen; or 0, one by one",
    )
    prefill_mode: Literal["pipelined", "drained"] = Field(
        default="pipelined",
        description="prompts are computed in steps that run ahead, or when nothing is in flight",
    )
    captured_steps: bool = Field(
        default=True,
        description="play recorded passes where there are native kernels, launch graphs of decode steps on a GPU; "
        "else call them from Python",
    )
    pass_threads: int | None = Field(
        default=None,
        ge=1,
        description="threads that share a recorded pass; default: all, or one less for few rows if that is as fast",
    )

    def captured_sizes(self) -> Sequence[int]:
        return graph_sizes(self.max_batch_size) if self.captured_steps else ()
