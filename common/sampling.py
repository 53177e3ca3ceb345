"""Choosing the next tokens of all sequences of a pass at once.

Greedy rows take the most likely token. A sampled row draws one number `u` in [0, 1) from its request's own CPU
generator and inverts the cumulative distribution that temperature and filters leave: the token at which the running
sum of probabilities first exceeds `u`.

```text
logits ─> penalties ─> tokens not allowed now ─> temperature ─> top-k ─> top-p ─> min-p ─> inverse CDF(u)
```

Top-k and top-p need an order of the tokens, and of 100,000 the first thousand are all but always enough of it: they
are found ten times as fast as all are sorted.

So the same logits and seed give the same token on every device, alone or in any batch. The logits are the same up
to rounding, which depends on who shares a pass: in float32 too little to change a token (unless two are all but
equally likely), in bfloat16 and float16 enough to.

Where numbers end: tokens of infinite logits share the whole probability, those of minus infinity are never chosen,
and a temperature beyond float32 makes all others equally likely. A row with a NaN in it, or with nothing but minus
infinity, has no token.
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
import torch.nn.functional as F
from torch import Tensor

from common.errors import GrammarFailedError
from common.request import Request, TokenLogprobs
from kernels.transfer import to_device

#: The id reported for a row whose logits allow no token.
NOT_A_TOKEN = -1

#: What temperatures are kept within: above 0, and within float32.
COLDEST, HOTTEST = 1e-5, torch.finfo(torch.float32).max

#: How many of the most likely tokens are put in order at first. Of 128,256, one thread found 256 in 0.3 ms, 1,024
#: in 0.6, and sorted all in 13: the larger number pays where one row in forty would need all but for it.
FIRST_CANDIDATES = 1024


class Sampled(NamedTuple):
    """One pass's choice, still on the device.

    Attributes:
        token_ids: [S] int64, `NOT_A_TOKEN` where a row had a NaN, or no score above minus infinity.
        logprobs: [L] float32 of the chosen tokens under the model's own distribution, for the L rows that asked,
            in order; None if nobody did.
        top_logprobs, top_ids: [L, n] the most likely tokens, n the largest number asked for.
    """

    token_ids: Tensor
    logprobs: Tensor | None = None
    top_logprobs: Tensor | None = None
    top_ids: Tensor | None = None


class SamplingInputs(NamedTuple):
    """What the rows of a pass ask for beside their most likely token: tensors, None where nobody asks for it.

    They hold all that comes from the requests, so that what is left, `choose`, is a function of tensors.

    Attributes:
        drawn: the D rows that draw their token, int64.
        settings: [D, 5] float64, what decides a draw beside the scores: see `_Settings`.
        unordered, ordered: places in `drawn` of those that need no order of the tokens, and of those that do.
        biased: [2, b] int32: rows, and tokens whose scores are changed.
        biases: [b] float32, by how much.
        penalised: [3, n] int32, an entry for each token of each row with penalties: row, token, times generated.
        penalties: [S, 3] float64: repetition, frequency and presence penalty of each row that has any.
        held_back: [2, m] int64: rows, and tokens that may not come yet.
        masked: the C rows that have a grammar, int64.
        words: [C, W] int32, their masks: see `TokenMasks`.
        reported: the L rows whose log-probabilities are asked for, int64.
        top: how many of the most likely tokens are reported with them.
    """

    drawn: Tensor | None = None
    settings: Tensor | None = None
    unordered: Tensor | None = None
    ordered: Tensor | None = None
    biased: Tensor | None = None
    biases: Tensor | None = None
    penalised: Tensor | None = None
    penalties: Tensor | None = None
    held_back: Tensor | None = None
    masked: Tensor | None = None
    words: Tensor | None = None
    reported: Tensor | None = None
    top: int = 0

    @classmethod
    def of(
        cls, requests: Sequence[Request], masks: TokenMasks | None, vocab: int, device: torch.device
    ) -> SamplingInputs:
        """Collect what the requests ask for, row by row. A request with several rows in sequence samples its next
        tokens there, one a row."""
        drawn: list[int] = []
        settings: list[tuple[float, ...]] = []
        places: tuple[list[int], list[int]] = ([], [])
        reported: list[int] = []
        penalised: list[npt.NDArray[np.int32]] = []
        penalties: npt.NDArray[np.float64] | None = None
        held_back: list[tuple[int, int]] = []
        biased: list[npt.NDArray[np.int32]] = []
        biases: list[npt.NDArray[np.float32]] = []
        ahead = 0  # tokens that the same request draws in the rows before
        for row, request in enumerate(requests):
            if request.takes_best:
                continue
            params, counts = request.params, request.token_counts
            if not params.greedy:
                # A row's own parameters decide its path, so that neighbours cannot.
                places[params.top_k is not None or params.top_p < 1.0].append(len(drawn))
                ahead = ahead + 1 if drawn and requests[drawn[-1]] is request else 0
                drawn.append(row)
                settings.append(_settings_of(request, ahead, vocab))
            if params.logprobs is not None:
                reported.append(row)
            if request.token_biases is not None:
                biased.append(request.token_biases.at_row(row))
                biases.append(request.token_biases.values)
            if counts is not None:
                penalties = np.zeros((len(requests), 3)) if penalties is None else penalties
                counts.catch_up(request.token_ids)
                penalised.append(counts.at_row(row))
                penalties[row] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
            if request.matcher is None:
                held_back += [(row, token_id) for token_id in request.held_back_token_ids]

        def moved(tensor: Tensor) -> Tensor:
            return to_device(tensor, device)

        def rows(values: Sequence[int]) -> Tensor | None:
            return moved(torch.tensor(values)) if values else None

        def joined(arrays: Sequence[npt.NDArray[Any]]) -> Tensor | None:
            """The arrays end to end; always a copy, since each changes in later steps."""
            return moved(torch.from_numpy(np.concatenate(arrays, axis=-1))) if arrays else None

        return cls(
            drawn=rows(drawn),
            settings=moved(torch.tensor(settings, dtype=torch.float64)) if drawn else None,
            unordered=rows(places[0]),
            ordered=rows(places[1]),
            biased=joined(biased),
            biases=joined(biases),
            penalised=joined(penalised),
            penalties=None if penalties is None else moved(torch.from_numpy(penalties)),
            held_back=moved(torch.tensor(held_back).T.contiguous()) if held_back else None,
            masked=None if masks is None else rows(masks.rows),
            words=None if masks is None else moved(masks.words),
            reported=rows(reported),
            top=min(max((requests[row].params.logprobs or 0 for row in reported), default=0), vocab),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, by name. With `top` they are all there is."""
        return {name: value for name, value in self._asdict().items() if isinstance(value, Tensor)}


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """What grammars leave to choose from in some rows of a pass.

    Attributes:
        rows: the C rows that have a grammar.
        words: [C, W] int32, on the host. Row `rows[c]` may choose token i if bit i % 32 of `words[c, i // 32]` is
            set.
    """

    rows: tuple[int, ...]
    words: Tensor

    @classmethod
    def of(cls, requests: Sequence[Request]) -> TokenMasks | None:
        """Return the masks for the tokens that come next, or None if no row has one. Waits until they are filled.

        A row whose matcher fails has no mask. Whatever is sampled there is dropped: committing it raises the
        matcher's error, which fails that request alone.
        """
        constrained = [
            (row, request, request.matcher)
            for row, request in enumerate(requests)
            if request.matcher is not None and not request.is_terminal
        ]
        for _, _, matcher in constrained:  # all of them, before the first is waited for
            matcher.begin_mask()
        masks: dict[int, npt.NDArray[np.uint32]] = {}
        for row, request, matcher in constrained:
            with contextlib.suppress(GrammarFailedError):
                masks[row] = matcher.mask(request.held_back_token_ids)
        if not masks:
            return None
        words = np.stack(list(masks.values()))
        return cls(tuple(masks), torch.from_numpy(words.view(np.int32)))


def sample(logits: Tensor, requests: Sequence[Request], masks: TokenMasks | None = None) -> Sampled:
    """Choose a token for each row.

    Args:
        logits: [S, vocab], any float type; not changed.
        requests: S of them, row by row.
        masks: of those that have a grammar.
    """
    return choose(logits, SamplingInputs.of(requests, masks, logits.shape[-1], logits.device))


def choose(logits: Tensor, inputs: SamplingInputs) -> Sampled:
    """The tokens that `inputs` ask for: operators only, that a tape can take."""
    raw = logits.float()
    scores = _adjust(raw, inputs)
    best, token_ids = scores.max(dim=-1)
    valid = best > -torch.inf  # a maximum is NaN where any entry is: no second look at the whole vocabulary
    if inputs.drawn is not None:
        rows = inputs.drawn
        token_ids = token_ids.index_copy(0, rows, _draw(_below(best[rows], scores[rows]), inputs))
    token_ids = torch.where(valid, token_ids, NOT_A_TOKEN)
    return (
        Sampled(token_ids)
        if inputs.reported is None
        else _report(raw, token_ids, inputs.reported, inputs.top)
    )


def _report(raw: Tensor, token_ids: Tensor, reported: Tensor, top: int) -> Sampled:
    """The log-probabilities of the rows that asked for them: [S, vocab], [S] -> L of the S rows."""
    raw = raw[reported]
    logprobs = _below(raw.amax(dim=-1), raw).log_softmax(dim=-1)
    values, ids = logprobs.topk(top, dim=-1)
    picked = logprobs.gather(-1, token_ids[reported].clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return Sampled(token_ids, picked, values, ids)


def read_logprobs(sampled: Sampled, requests: Sequence[Request]) -> list[TokenLogprobs | None]:
    """The log-probabilities each request asked for, on the host."""
    if sampled.logprobs is None or sampled.top_logprobs is None or sampled.top_ids is None:
        return [None] * len(requests)
    entries = zip(
        sampled.logprobs.tolist(), sampled.top_logprobs.tolist(), sampled.top_ids.tolist(), strict=True
    )
    found: list[TokenLogprobs | None] = []
    for request in requests:
        count = request.params.logprobs
        if count is None:
            found.append(None)
            continue
        chosen, values, ids = next(entries)
        found.append(TokenLogprobs(chosen, tuple(zip(ids[:count], values[:count], strict=True))))
    return found


# ---------------------------------------------------------------------- what changes the scores


def _adjust(raw: Tensor, inputs: SamplingInputs) -> Tensor:
    """Biases, penalties, endings that may not come yet, and what grammars forbid: [S, vocab] -> [S, vocab], `raw`
    itself if none apply."""
    scores = raw
    if inputs.biased is not None and inputs.biases is not None:
        scores = scores.index_put(inputs.biased.unbind(), inputs.biases, accumulate=True)
    if inputs.penalised is not None and inputs.penalties is not None:
        scores = _penalise(scores, inputs.penalised, inputs.penalties)
    if inputs.held_back is not None:
        scores = scores.index_put(inputs.held_back.unbind(), scores.new_full((), -torch.inf))
    if inputs.masked is not None and inputs.words is not None:
        scores = _forbid(scores, inputs.masked, inputs.words)
    return scores


def _forbid(scores: Tensor, rows: Tensor, words: Tensor) -> Tensor:
    """Minus infinity for the tokens of [S, vocab] whose bit is not set in the words [C, W] of these C rows."""
    # By bytes, each of which stands for one of 256 rows of eight bounds: many times as fast as bit by bit.
    bits = torch.arange(256, device=scores.device).unsqueeze(1) >> torch.arange(8, device=scores.device) & 1
    bounds = torch.where(bits > 0, torch.inf, -torch.inf)
    highest = bounds.index_select(0, words.view(torch.uint8).flatten().int()).view(-1, 32 * words.shape[1])
    # A tokenizer may have more ids than the model. The smaller of a NaN and anything is NaN.
    return scores.index_copy(0, rows, torch.minimum(scores[rows], highest[:, : scores.shape[-1]]))


def _penalise(scores: Tensor, entries: Tensor, penalties: Tensor) -> Tensor:
    """Penalties of some rows of [S, vocab], all of them at once; entries and penalties as in `SamplingInputs`.

    Repetition (Keskar et al. 2019) divides positive and multiplies negative scores of all tokens so far, those of
    the prompt too. Frequency subtracts per occurrence and presence once, for generated tokens only, as OpenAI's do.
    In float64, which holds every penalty a request can name.
    """
    rows, token_ids, generated = entries.unbind()
    factor, frequency, presence = (column[rows] for column in penalties.unbind(1))
    values = scores[rows, token_ids].double()
    values = torch.where(values > 0, values / factor, values * factor).float().double()
    penalty = torch.where(generated > 0, frequency * generated + presence, 0.0)
    return scores.index_put((rows, token_ids), (values - penalty).float())


# ---------------------------------------------------------------------- drawing


class _Settings(NamedTuple):
    """What decides a draw beside the scores: [R, 1] each, float64."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor

    @classmethod
    def at(cls, table: Tensor, rows: Tensor) -> _Settings:
        """Of some rows of a table [D, 5]."""
        return cls(*table[rows].unsqueeze(2).unbind(1))


def _settings_of(request: Request, ahead: int, vocab: int) -> tuple[float, ...]:
    """A row of the table that `_Settings` are taken from."""
    params = request.params
    return (
        min(max(params.temperature, COLDEST), HOTTEST),
        min(params.top_k or vocab, vocab),
        params.top_p if params.top_p < 1.0 else math.inf,  # which no sum reaches
        params.min_p,
        request.next_uniform(ahead),
    )


def _below(best: Tensor, scores: Tensor) -> Tensor:
    """How far each score lies below its row's best, [R], [R, vocab] -> [R, vocab]: from minus infinity to 0.

    A softmax sees nothing else of them. Infinite scores are all best; a row without a token becomes all zeros.
    """
    return (scores - best.unsqueeze(1)).nan_to_num_(nan=0.0, neginf=-torch.inf)


def _draw(scores: Tensor, inputs: SamplingInputs) -> Tensor:
    """One sampled token per row that draws: [D, vocab], each row's best 0 -> [D]."""
    assert inputs.drawn is not None
    assert inputs.settings is not None
    drawn = torch.empty_like(inputs.drawn)
    if inputs.unordered is not None:
        rows = inputs.unordered
        settings = _Settings.at(inputs.settings, rows)
        drawn = drawn.index_copy(0, rows, _pick(_heated(scores[rows], settings), settings))
    if inputs.ordered is not None:
        rows = inputs.ordered
        own = scores[rows]
        settings = _Settings.at(inputs.settings, rows)
        drawn = drawn.index_copy(0, rows, _draw_ordered(own, _heated(own, settings), settings))
    return drawn


def _heated(scores: Tensor, settings: _Settings) -> Tensor:
    """Probabilities: [R, vocab] -> [R, vocab]."""
    return (scores / settings.temperature.float()).softmax(dim=-1)


def _draw_ordered(scores: Tensor, probabilities: Tensor, settings: _Settings) -> Tensor:
    """One token per row under top-k and top-p: [R, vocab], [R, vocab] -> [R].

    From the candidates that are most likely, and from all tokens in rows where those do not suffice. Which of the
    two it was changes no bit: probabilities, and sums of them up to a rank, are the same whatever comes after it.
    In order of the scores before the temperature: a huge one leaves no differences.
    """
    vocab = scores.shape[-1]
    # Finding the rows that need more reads from the device. On a GPU the host would wait for every pass before, so
    # all rows are sorted whole there, which takes the device longer, and scratch memory for the whole vocabulary.
    candidates = min(FIRST_CANDIDATES, vocab) if scores.device.type == "cpu" else vocab
    drawn, suffice = _draw_from_first(scores, probabilities, settings, candidates)
    if candidates == vocab:
        return drawn
    rows = (~suffice).nonzero().squeeze(1)  # mostly none: a handful of operators on nothing
    settings = _Settings(*(column[rows] for column in settings))
    return drawn.index_copy(0, rows, _draw_from_first(scores[rows], probabilities[rows], settings, vocab)[0])


def _draw_from_first(
    scores: Tensor, probabilities: Tensor, settings: _Settings, count: int
) -> tuple[Tensor, Tensor]:
    """The same from the `count` most likely tokens -> the tokens [R], and whether so many were enough [R]."""
    ids, complete = _most_likely(scores, count)
    kept, suffice = _keep_first(probabilities.gather(1, ids), complete, scores.shape[-1], settings)
    return ids.gather(1, _pick(kept, settings).unsqueeze(1)).squeeze(1), suffice


def _most_likely(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` tokens in descending order, equal ones by their ids: [R, vocab] -> [R, count].

    Returns:
        Their ids, and how many of them, from the first on, are what a sort of the whole row begins with [R, 1]:
        of tokens as likely as the last one, others may have been left out.
    """
    if count == scores.shape[-1]:
        ids = scores.argsort(dim=-1, descending=True, stable=True)
        return ids, torch.full_like(ids[:, :1], count)
    ids = scores.topk(count, sorted=False).indices.sort(dim=-1).values
    values, order = scores.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return ids.gather(1, order), (values > values[:, -1:]).sum(dim=-1, keepdim=True)


def _keep_first(
    probabilities: Tensor, complete: Tensor, vocab: int, settings: _Settings
) -> tuple[Tensor, Tensor]:
    """Top-k, then the nucleus (Holtzman et al. 2019) of what that leaves.

    Args:
        probabilities: [R, n], each row's most likely tokens in descending order.
        complete: [R, 1], how many of them are known to be those of the first ranks.
        vocab: how many tokens there are.
        settings: of these rows.

    Returns:
        The probabilities [R, n] with 0 for tokens that are filtered out, and whether all that are kept are among
        the `complete` ones [R].
    """
    ranks = torch.arange(probabilities.shape[-1], device=probabilities.device)
    top_k = settings.top_k.long()
    sums = probabilities.cumsum(dim=-1, dtype=torch.float64)
    everything = top_k == vocab
    total = torch.where(everything, 1.0, sums.gather(1, top_k.clamp(max=len(ranks)) - 1))
    enough = settings.top_p * total
    # A token is kept where those before it have not reached that: the first one always.
    kept = (ranks < top_k) & F.pad(sums[:, :-1] < enough, (1, 0), value=True)
    reached = (complete > 0) & (sums.gather(1, (complete - 1).clamp(min=0)) >= enough)
    suffice = torch.where(everything, reached, top_k <= complete)
    return probabilities.masked_fill(~kept, 0.0), suffice.squeeze(1)


def _pick(probabilities: Tensor, settings: _Settings) -> Tensor:
    """Min-p, then the first entry at which the running sum exceeds `u` of the total: [R, n] -> [R].

    Sums are float64: over 100,000 small float32 entries the end of the distribution would be lost.
    """
    floor = settings.min_p.float() * probabilities.amax(dim=-1, keepdim=True)
    cdf = probabilities.masked_fill(probabilities < floor, 0.0).cumsum(dim=-1, dtype=torch.float64)
    total = cdf[:, -1:].clone()  # `contiguous` does nothing for one row, and would be missing in a recording
    picked = torch.searchsorted(cdf, settings.uniform * total, right=True)
    # Rounding can put the target on the total itself: the entry that completes the sum is meant then.
    return torch.minimum(picked, torch.searchsorted(cdf, total)).squeeze(1)
