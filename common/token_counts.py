"""How often a request has generated each token: what its penalties are computed from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class TokenCounts:
    """The tokens that a request's penalties fall on, and how often it has generated each.

    Kept from step to step: a token is looked at when it is new, and not again for every later one. Only what
    occurred has an entry, so that a request takes 16 bytes for each token of its prompt and of its longest answer;
    a count for each token of the vocabulary would take a megabyte.

    Args:
        prompt: the request's.
        max_new_tokens: how many it can generate.
        with_prompt: whether the prompt's tokens are penalised, too.
    """

    def __init__(self, prompt: Sequence[int], max_new_tokens: int, *, with_prompt: bool) -> None:
        known = dict.fromkeys(prompt) if with_prompt else {}
        self._entries = {token_id: entry for entry, token_id in enumerate(known)}
        room = len(known) + max_new_tokens
        self._token_ids = np.zeros(room, dtype=np.int64)
        self._token_ids[: len(known)] = list(known)
        self._generated = np.zeros(room, dtype=np.int64)
        self._counted = len(prompt)

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """Count what has come since the last call. `token_ids`: the prompt and all that was generated."""
        for token_id in token_ids[self._counted :]:
            entry = self._entries.setdefault(token_id, len(self._entries))
            self._token_ids[entry] = token_id
            self._generated[entry] += 1
        self._counted = len(token_ids)

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """[n], each once."""
        return self._token_ids[: len(self._entries)]

    @property
    def generated(self) -> npt.NDArray[np.int64]:
        """[n]: how often each of `token_ids` was generated; 0 for those of the prompt alone."""
        return self._generated[: len(self._entries)]
