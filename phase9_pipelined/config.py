"""Options of pipelined decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from phase8_prefix.config import Config as PrefixConfig

#: Most rows of a graph. The kernels of a pass with more rows run so long that the host can launch them one by one.
MOST_ROWS = 512
BUCKETS = (1, 2, 4, 8, *range(16, 256, 16), *range(256, MOST_ROWS + 1, 32))


def graph_sizes(sequences: int) -> list[int]:
    """Return the numbers of rows that graphs are captured for, smallest first.

    Args:
        sequences: the most rows of a pass. The last graph has as many, at most `MOST_ROWS`.
    """
    last = min(sequences, MOST_ROWS)
    return [*(size for size in BUCKETS if size < last), last]


class Config(PrefixConfig):
    """Phase 8's options, how far steps run ahead of their results, and how passes are computed."""

    pipeline_depth: int = Field(default=2, ge=0, le=2)
    """most steps in flight; 1: the next pass is launched, but not sampled, before this step's tokens are read; 0:
    each step ends before the next is launched"""
    prefill_mode: Literal["pipelined", "drained"] = "pipelined"
    """pipelined: steps with prompts run ahead like others; drained: they are launched when nothing is in flight"""
    captured_steps: bool = True
    """play recordings of passes (on a CPU with native kernels), or launch decode steps as CUDA graphs; otherwise
    Python calls each operator"""
    pass_threads: int | None = Field(default=None, ge=1)
    """threads that compute a recorded pass; default: all, or one less for weights of at most 32 MiB"""

    def captured_sizes(self) -> Sequence[int]:
        return graph_sizes(self.max_batch_size) if self.captured_steps else ()
