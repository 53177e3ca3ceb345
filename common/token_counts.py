"""The tokens whose scores a request's penalties and biases change, as arrays that are kept between steps.

A step concatenates the arrays of its requests. Each new token is added to its request's array once, so a step does
not go through all earlier tokens. Decode steps on a GPU count on the device: see `kernels.penalties`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


class TokenCounts:
    """The tokens that a request's penalties apply to, and how often each was generated.

    Only tokens that occurred have an entry, of 12 bytes. Memory is allocated for `max_new_tokens` entries and, if
    `with_prompt`, for each different token of the prompt. A count for each token of the vocabulary would take half
    a megabyte.

    Args:
        prompt: the request's prompt.
        max_new_tokens: the most tokens that the request can generate.
        with_prompt: whether the prompt's tokens are penalised, too.
    """

    def __init__(self, prompt: Sequence[int], max_new_tokens: int, *, with_prompt: bool) -> None:
        known = dict.fromkeys(prompt) if with_prompt else {}
        self._places = {token_id: place for place, token_id in enumerate(known)}
        # [3, n]: row of the pass, token id, times generated. One column for each token.
        self._entries = np.zeros((3, len(known) + max_new_tokens), dtype=np.int32)
        self._entries[1, : len(known)] = list(known)
        self._counted = len(prompt)
        self._row = 0

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """Count the tokens that are new since the last call. `token_ids`: prompt and all generated tokens."""
        for token_id in token_ids[self._counted :]:
            place = self._places.setdefault(token_id, len(self._places))
            self._entries[:2, place] = self._row, token_id
            self._entries[2, place] += 1
        self._counted = len(token_ids)

    def at_row(self, row: int) -> npt.NDArray[np.int32]:
        """Return the request's entries for a pass in which it has row `row`.

        Returns:
            [3, n]: the row, each token once, and how often it was generated (0 for tokens of the prompt alone).
            Valid until the next call of a method.
        """
        entries = self._entries[:, : len(self._places)]
        if row != self._row:
            entries[0] = self._row = row
        return entries

    def guessed(self, row: int, token_ids: Sequence[int]) -> npt.NDArray[np.int32]:
        """Return a new array: the entries that `at_row` would have if these tokens had been generated, too."""
        known = self._entries[:, : len(self._places)]
        new = [token_id for token_id in dict.fromkeys(token_ids) if token_id not in self._places]
        entries = np.pad(known, ((0, 0), (0, len(new))))
        entries[0] = row
        entries[1, known.shape[1] :] = new
        places = self._places | {token_id: known.shape[1] + i for i, token_id in enumerate(new)}
        for token_id in token_ids:
            entries[2, places[token_id]] += 1
        return entries


class TokenBiases:
    """The tokens whose scores a request's biases change.

    Args:
        biases: token ids and biases.

    Attributes:
        values: [b] float32, the biases.
    """

    def __init__(self, biases: Sequence[tuple[int, float]]) -> None:
        token_ids, values = zip(*biases, strict=True)
        self.values = torch.tensor(values, dtype=torch.float32).numpy()
        self._entries = np.array([[0] * len(token_ids), token_ids], dtype=np.int32)

    def at_row(self, row: int) -> npt.NDArray[np.int32]:
        """Return the entries for a pass in which the request has row `row`: [2, b], the row and each token."""
        entries = self._entries.copy()
        entries[0] = row
        return entries
