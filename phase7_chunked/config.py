"""Options of chunked prefill."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from phase6_paged.config import Config as PagedConfig


def one_chunk(validated: dict[str, Any]) -> int | None:
    """Return the default of `prefill_token_budget`: the chunk size. None: the given chunk size is invalid."""
    return validated.get("prefill_chunk_size")


class Config(PagedConfig):
    """Phase 6's options, and limits on the prompt tokens of a step.

    A step computes at most `prefill_token_budget` prompt tokens, of at most `max_prefill_chunks_per_step` prompts,
    and at most `prefill_chunk_size` of each prompt. Beside them it computes a token for each decoding request.
    """

    use_chunked_prefill: bool = True
    """divide prompts into chunks; without it this phase works as phase 6"""
    prefill_chunk_size: int = Field(default=256, ge=1)
    """most tokens of one prompt computed in a step; default on a GPU: measured at the start"""
    max_prefill_chunks_per_step: int | None = Field(default=None, ge=1)
    """most prompts of which a chunk is computed in a step; none: all waiting prompts"""
    prefill_token_budget: int | None = Field(default_factory=one_chunk, ge=1)
    """most prompt tokens computed in a step; default: one chunk; none: no limit"""
    mixed_batches: bool = True
    """compute chunks and decode tokens in one forward pass; otherwise decode tokens first, then chunks"""

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        if self.use_chunked_prefill:
            return self
        for name in (
            "prefill_chunk_size",
            "max_prefill_chunks_per_step",
            "prefill_token_budget",
            "mixed_batches",
        ):
            field = type(self).model_fields[name]
            default = field.get_default(call_default_factory=True, validated_data=self.__dict__)
            if getattr(self, name) != default:
                raise ValueError(f"{name} has no meaning without use_chunked_prefill: leave one of them out")
        return self

    def with_chunk(self, tokens: int) -> Self:
        if not self.use_chunked_prefill or "prefill_chunk_size" in self.model_fields_set:
            return self
        changed = {"prefill_chunk_size": tokens}
        if "prefill_token_budget" not in self.model_fields_set:
            changed["prefill_token_budget"] = tokens
        return self.model_copy(update=changed)

    def max_pass_tokens(self) -> int:
        """Return an upper bound of a pass's tokens: chunks within the step's budget, and one for each seat.

        Without `use_chunked_prefill`, the bound is phase 6's.
        """
        whole = super().max_pass_tokens()
        if not self.use_chunked_prefill:
            return whole
        chunks = (self.max_prefill_chunks_per_step or self.max_batch_size) * self.prefill_chunk_size
        prompts = min(whole, chunks, self.prefill_token_budget or chunks)
        return min(prompts + self.max_batch_size, self.kv_tokens())
