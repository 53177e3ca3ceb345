"""Options of chunked prefill."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from phase6_paged.config import Config as PagedConfig


class Config(PagedConfig):
    """Phase 6's options, and how much of a prompt one step computes.

    A step's work is bounded by `prefill_chunk_size` × `max_prefill_chunks_per_step` tokens (with none, a chunk for
    every seat) and one for everybody who decodes.
    """

    use_chunked_prefill: bool = Field(default=True, description="without it this phase is phase 6")
    prefill_chunk_size: int = Field(
        default=256, ge=1, description="most tokens of one prompt computed in a step"
    )
    max_prefill_chunks_per_step: int | None = Field(
        default=1,
        ge=1,
        description="prompt tokens in a step, in full chunks; none: a chunk of every pending prompt",
    )
    mixed_batches: bool = Field(
        default=True,
        description="chunks and decode tokens in one forward pass, or decode first and then chunks",
    )

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        fields = type(self).model_fields
        if not self.use_chunked_prefill:
            for name in ("prefill_chunk_size", "max_prefill_chunks_per_step", "mixed_batches"):
                if getattr(self, name) != fields[name].default:
                    raise ValueError(
                        f"{name} has no meaning without use_chunked_prefill: leave one of them out"
                    )
        return self
