"""Collects the sampling parameters of requests as tensors, for the functions in `common.sampling.draw`.

```text
requests ──> TokenMasks.of ──> masks of tokens ───┐
requests, row by row ─────────────────────────────┴─> SamplingInputs.of ──> common.sampling.draw.choose
```
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.constrained.allowed_tokens import Mask
from common.errors import GrammarFailedError
from common.request import Request, SamplingParams
from kernels.draw import SETTINGS
from kernels.transfer import move_together

#: Bounds that temperatures are clamped to: above 0, and within float32.
COLDEST, HOTTEST = 1e-5, torch.finfo(torch.float32).max

#: A greedy row of `SamplingInputs.settings`.
GREEDY = (0.0,) * SETTINGS


class SamplingInputs(NamedTuple):
    """The sampling parameters of a pass's rows as tensors. A tensor is None if no row uses its feature.

    The fields hold everything that depends on the requests, so that `choose` is a function of tensors.

    Attributes:
        settings: [S, 5] float64, temperature, filters and random number of each row, if any row samples: see
            `kernels.draw.SETTINGS`.
        unordered: [U] int64, the rows that are not greedy and have neither top-k nor top-p: they need no sort.
        ordered: [O] int64, the rows that are not greedy and have top-k or top-p.
        biased: [2, b] int32, rows and tokens whose scores get a bias.
        biases: [b] float32, the biases.
        penalised: [3, n] int32, an entry for each token of each row with penalties: row, token, times generated.
        penalties: [S, 3] float64, repetition, frequency and presence penalty of each row that has any.
        unread: [R] int64, the rows with penalties whose latest token was sampled on the device and is not read yet.
            `penalised` does not count this token.
        unread_ids: [R] int64, these tokens. `of` leaves the field to its caller, since the host does not know them.
        held_back: [2, m] int64, rows without a grammar, and EOS and stop tokens that may not be sampled there yet.
            (A grammar's mask has them already.)
        masked: [C] int64, the rows that have a mask.
        words: [C, W] int32, their masks: see `TokenMasks`.
        reported: [L] int64, the rows that report log-probabilities.
        top: number of most likely tokens that are reported for each of these rows.
    """

    settings: Tensor | None = None
    unordered: Tensor | None = None
    ordered: Tensor | None = None
    biased: Tensor | None = None
    biases: Tensor | None = None
    penalised: Tensor | None = None
    penalties: Tensor | None = None
    unread: Tensor | None = None
    unread_ids: Tensor | None = None
    held_back: Tensor | None = None
    masked: Tensor | None = None
    words: Tensor | None = None
    reported: Tensor | None = None
    top: int = 0

    @classmethod
    def of(
        cls, requests: Sequence[Request], masks: TokenMasks | None, vocab: int, device: torch.device
    ) -> SamplingInputs:
        """Collect the parameters of a pass's rows as tensors on a device.

        A request may have several adjacent rows. Each of its rows samples a token as if the guesses before that
        token (`Drafts.token_ids`) had been generated.

        Args:
            requests: the request of each row.
            masks: the masks of the rows that have one; None: no row has one.
            vocab: size of the vocabulary.
            device: the device of the tensors.
        """
        settings: list[Sequence[float]] = [GREEDY] * len(requests)
        drawn: tuple[list[int], list[int]] = ([], [])
        reported: list[int] = []
        penalised: list[npt.NDArray[np.int32]] = []
        penalties: npt.NDArray[np.float64] | None = None
        unread: list[int] = []
        held_back: list[tuple[int, int]] = []
        biased: list[npt.NDArray[np.int32]] = []
        biases: list[npt.NDArray[np.float32]] = []
        ahead = 0  # tokens that the same request samples in earlier rows
        before: Request | None = None
        for row, request in enumerate(requests):
            if request.sampling.takes_best:
                continue
            ahead = ahead + 1 if request is before else 0
            before = request
            params, counts = request.params, request.sampling.counts
            if not params.greedy:
                # A row's own parameters choose its code path, so that other rows do not change its result.
                drawn[is_ordered(params)].append(row)
                settings[row] = settings_of(request, ahead, vocab)
            if params.logprobs is not None:
                reported.append(row)
            changed = request.sampling.biases
            if changed is not None:
                biased.append(changed.at_row(row))
                biases.append(changed.values)
            if counts is not None:
                penalties = np.zeros((len(requests), 3)) if penalties is None else penalties
                counts.catch_up(request.token_ids)
                penalised.append(
                    counts.guessed(row, request.drafts.token_ids[:ahead]) if ahead else counts.at_row(row)
                )
                penalties[row] = params.penalties
                if request.pending_tokens:
                    unread.append(row)
            if request.matcher is None:
                held_back += [(row, token_id) for token_id in request.held_back_token_ids(ahead)]

        def rows(values: Sequence[int]) -> Tensor | None:
            return torch.tensor(values) if values else None

        def joined(arrays: Sequence[npt.NDArray[Any]]) -> Tensor | None:
            """Concatenate arrays into a new tensor, since each array changes in later steps. None if the list is
            empty."""
            return torch.from_numpy(np.concatenate(arrays, axis=-1)) if arrays else None

        inputs = cls(
            settings=torch.tensor(settings, dtype=torch.float64) if any(drawn) else None,
            unordered=rows(drawn[0]),
            ordered=rows(drawn[1]),
            biased=joined(biased),
            biases=joined(biases),
            penalised=joined(penalised),
            penalties=None if penalties is None else torch.from_numpy(penalties),
            unread=rows(unread),
            held_back=torch.tensor(held_back).T.contiguous() if held_back else None,
            masked=None if masks is None else rows(masks.rows),
            words=None if masks is None else masks.words,
            reported=rows(reported),
            top=min(max((requests[row].params.logprobs or 0 for row in reported), default=0), vocab),
        )
        hosts = inputs.tensors()
        moved: dict[str, Any] = dict(zip(hosts, move_together(list(hosts.values()), device), strict=True))
        return inputs._replace(**moved)

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields that are tensors, by name: all fields that are not None, except `top`."""
        return {name: value for name, value in self._asdict().items() if isinstance(value, Tensor)}


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The tokens that grammars, `allowed_token_ids` and `bad_words` allow in some rows of a pass.

    Attributes:
        rows: indices of the C rows that have a mask.
        words: [C, W] int32, on the host. Row `rows[c]` may choose token i if bit i % 32 of `words[c, i // 32]` is
            set.
    """

    rows: tuple[int, ...]
    words: Tensor

    @classmethod
    def of(cls, requests: Sequence[Request]) -> TokenMasks | None:
        """Return the masks for the next tokens of `requests`, which names the request of each row.

        Blocks until the masks are computed. Returns None if no row has a mask. The rows of a request whose matcher
        fails have none. Their sampled tokens are never used: committing the first of them raises the matcher's
        error, which fails that request alone.
        """
        first_rows: dict[Request, int] = {}
        for row, request in enumerate(requests):
            if request.is_masked and not request.is_terminal:
                first_rows.setdefault(request, row)
        for request in first_rows:  # start all masks before waiting for the first
            if request.matcher is not None:
                request.matcher.begin_mask()
        masks: dict[int, Mask] = {}
        for request, row in first_rows.items():
            with contextlib.suppress(GrammarFailedError):
                masks.update(enumerate(request.masks(), start=row))
        if not masks:
            return None
        words = np.stack(list(masks.values()))
        return cls(tuple(masks), torch.from_numpy(words.view(np.int32)))


def is_ordered(params: SamplingParams) -> bool:
    """Return whether a sampled row has top-k or top-p, so that it sums its probabilities in order of rank (the
    likeliest first) instead of token id."""
    return params.top_k is not None or params.top_p < 1.0


def settings_of(request: Request, ahead: int, vocab: int) -> tuple[float, ...]:
    """Return a row of `SamplingInputs.settings` for a request that is not greedy. `ahead`: as for
    `Request.next_uniform`."""
    params = request.params
    return (
        min(max(params.temperature, COLDEST), HOTTEST),
        min(params.top_k or vocab, vocab) if is_ordered(params) else 0.0,
        params.top_p if params.top_p < 1.0 else math.inf,  # no sum reaches infinity: nothing is filtered
        params.min_p,
        request.next_uniform(ahead),
    )
