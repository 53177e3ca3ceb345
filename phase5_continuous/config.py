"""Options of continuous batching."""

from __future__ import annotations

from pydantic import Field

from common.engine.config import EngineConfig


class Config(EngineConfig):
    """The base options, and the most prompt tokens of a pass."""

    max_prefill_pass_tokens: int = Field(default=8192, ge=1)
    """most prompt tokens computed in one pass; a longer prompt gets a pass of its own"""

    def max_pass_tokens(self) -> int:
        assert self.max_seq_len is not None
        return min(super().max_pass_tokens(), max(self.max_prefill_pass_tokens, self.max_seq_len))
