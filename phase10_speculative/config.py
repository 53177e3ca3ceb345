"""Options of speculative decoding."""

from __future__ import annotations

from pydantic import Field

from phase9_pipelined.config import Config as PipelinedConfig

MOST_ROWS = 128  # most rows of a step with guesses, if `draft_rows` is not set


class Config(PipelinedConfig):
    """Phase 9's options, and how much is guessed."""

    draft_length: int = Field(default=15, ge=0, le=63)
    """most guesses of one request in a step; 0: this phase is phase 9"""
    draft_rows: int | None = Field(default=None, ge=1)
    """most rows of a step with guesses, which are then computed whether or not they pay; default: guesses are
    computed if the measured time of a row and the share of right guesses say that they pay"""
    draft_from_finished: bool = False
    """also guess from the texts of finished requests with the same cache salt"""

    def max_pass_tokens(self) -> int:
        return min(max(super().max_pass_tokens(), self.max_sampled_rows()), self.kv_tokens())

    def max_sampled_rows(self) -> int:
        """Return the most rows of a pass from which a token is sampled: one for each sequence and guess.

        Guesses are added only as long as a step has at most `draft_rows` rows (None: `MOST_ROWS`).
        """
        sequences = super().max_sampled_rows()
        return max(sequences, min(sequences * (1 + self.draft_length), self.draft_rows or MOST_ROWS))
