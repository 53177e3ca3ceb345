"""Options of paged attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Self

from pydantic import Field

from common.engine.config import GPU_SEATS, SAFE_SEQ_LEN
from phase5_continuous.config import Config as ContinuousConfig

MOST_BLOCKS = 2**26


class Config(ContinuousConfig):
    """Phase 5's options, and those of KV blocks.

    `max_batch_size` limits the sequences computed together, `num_blocks` the KV memory. They are independent.
    """

    kv_cache_backend: Literal["paged", "contiguous"] = "paged"
    """paged: blocks; contiguous: phase 5's slots, which ignore the options of blocks"""
    block_size: int = Field(default=16, ge=1)
    """tokens in a block of KV memory"""
    num_blocks: int | None = Field(
        default=None,
        ge=1,
        description="number of blocks; default: enough for max_batch_size sequences of max_seq_len, or of "
        f"{SAFE_SEQ_LEN} tokens if that is less, and for one of max_seq_len; on a GPU, as many blocks as fit "
        "(--num-gpu-blocks is the same option)",
    )

    def with_length(self, tokens: int, *, on_gpu: bool) -> Self:
        if self.kv_cache_backend == "contiguous":
            return super().with_length(tokens, on_gpu=on_gpu)
        return self.model_copy(update={"max_seq_len": tokens})  # seats share the blocks

    def for_gpu(self, fits: Callable[[Self], bool]) -> Self:
        if self.kv_cache_backend == "contiguous":
            return super().for_gpu(fits)
        seats = self.max_batch_size if "max_batch_size" in self.model_fields_set else GPU_SEATS
        while True:
            sized = self.model_copy(update={"max_batch_size": seats})
            if self.num_blocks is None:
                sized = sized.largest("num_blocks", MOST_BLOCKS, fits)
            assert self.max_seq_len is not None
            enough = fits(sized) and sized.kv_tokens() >= self.max_seq_len
            if enough or seats == 1 or "max_batch_size" in self.model_fields_set:
                return sized
            seats //= 2  # fewer rows of logits leave memory for a sequence at its longest

    def resolve_num_blocks(self) -> int:
        """Return the number of blocks in the pool. Without `num_blocks`, `max_seq_len` must not be None."""
        if self.num_blocks is not None:
            return self.num_blocks
        assert self.max_seq_len is not None
        tokens = max(self.max_batch_size * min(self.max_seq_len, SAFE_SEQ_LEN), self.max_seq_len)
        return -(-tokens // self.block_size)

    def kv_tokens(self) -> int:
        if self.kv_cache_backend == "contiguous":
            return super().kv_tokens()
        return self.resolve_num_blocks() * self.block_size

    def kv_formula(self) -> str:
        if self.kv_cache_backend == "contiguous":
            return super().kv_formula()
        return f"{self.resolve_num_blocks()} blocks × {self.block_size}"

    def kv_advice(self) -> str:
        return super().kv_advice() if self.num_blocks is None else "lower --num-blocks"
