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

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.request import Request, SamplingParams, TokenLogprobs
from common.token_counts import TokenCounts

#: The id reported for a row whose logits allow no token.
NOT_A_TOKEN = -1

#: What temperatures are kept within: above 0, and within float32.
COLDEST, HOTTEST = 1e-5, torch.finfo(torch.float32).max

#: How many of the most likely tokens are put in order at first. Of 128,256, one thread found 256 in 0.3 ms, 1,024
#: in 0.6, and sorted all in 13: the larger number pays where one row in forty would need all but for it.
FIRST_CANDIDATES = 1024


@dataclass(frozen=True, slots=True)
class Sampled:
    """One pass's choice, still on the device.

    Attributes:
        token_ids: [S] int64, `NOT_A_TOKEN` where a row had a NaN, or no score above minus infinity.
        reported: the L rows whose log-probabilities were asked for.
        logprobs: [L] float32 of the chosen tokens under the model's own distribution; None if nobody asked.
        top_logprobs, top_ids: [L, n] the most likely tokens, n the largest number asked for.
    """

    token_ids: Tensor
    reported: tuple[int, ...] = ()
    logprobs: Tensor | None = None
    top_logprobs: Tensor | None = None
    top_ids: Tensor | None = None


@dataclass(slots=True)
class _Work:
    """Which rows of a pass ask for more than a maximum: found in one look at the requests."""

    drawn: list[int] = field(default_factory=list)
    reported: list[int] = field(default_factory=list)
    penalised: list[tuple[int, SamplingParams, TokenCounts]] = field(default_factory=list)
    too_early: list[tuple[int, int]] = field(default_factory=list)  # row, a token that may not end it yet

    @classmethod
    def of(cls, requests: Sequence[Request]) -> _Work:
        work = cls()
        for row, request in enumerate(requests):
            if request.takes_best:
                continue
            params, counts = request.params, request.token_counts
            if not params.greedy:
                work.drawn.append(row)
            if params.logprobs is not None:
                work.reported.append(row)
            if counts is not None:
                counts.catch_up(request.token_ids)
                work.penalised.append((row, params, counts))
            if request.matcher is None:
                work.too_early += [(row, token_id) for token_id in request.held_back_token_ids]
        return work


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
        """The masks for the tokens that come next; None if no row has a grammar. Changes nothing.

        Raises:
            GrammarFailedError: a grammar has become too much to follow.
        """
        matchers = [
            (row, request.matcher, request.held_back_token_ids)
            for row, request in enumerate(requests)
            if request.matcher is not None and not request.is_terminal
        ]
        if not matchers:
            return None
        words = np.empty((len(matchers), matchers[0][1].words), dtype=np.uint32)
        for mask, (_, matcher, held_back) in zip(words, matchers, strict=True):
            matcher.fill_mask(mask, held_back)
        return cls(tuple(row for row, _, _ in matchers), torch.from_numpy(words.view(np.int32)))


def sample(logits: Tensor, requests: Sequence[Request], masks: TokenMasks | None = None) -> Sampled:
    """Choose a token for each row.

    Args:
        logits: [S, vocab], any float type; not changed.
        requests: S of them, row by row.
        masks: of those that have a grammar.
    """
    work = _Work.of(requests)
    raw = logits.float()
    scores = _adjust(raw, work, masks)
    best, token_ids = scores.max(dim=-1)
    valid = best > -torch.inf  # a maximum is NaN where any entry is: no second look at the whole vocabulary
    if work.drawn:
        rows = torch.tensor(work.drawn, device=logits.device)
        token_ids[rows] = _draw(_below(best[rows], scores[rows]), [requests[row] for row in work.drawn])
    token_ids = torch.where(valid, token_ids, NOT_A_TOKEN)
    return _report(raw, token_ids, work.reported, requests) if work.reported else Sampled(token_ids)


def _report(raw: Tensor, token_ids: Tensor, reported: Sequence[int], requests: Sequence[Request]) -> Sampled:
    """The log-probabilities of the rows that asked for them: [S, vocab], [S] -> L of the S rows."""
    rows = torch.tensor(reported, device=raw.device)
    raw = raw[rows]
    logprobs = _below(raw.amax(dim=-1), raw).log_softmax(dim=-1)
    count = max(requests[row].params.logprobs or 0 for row in reported)
    top = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
    picked = logprobs.gather(-1, token_ids[rows].clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return Sampled(token_ids, tuple(reported), picked, top.values, top.indices)


def read_logprobs(sampled: Sampled, requests: Sequence[Request]) -> list[TokenLogprobs | None]:
    """The log-probabilities each request asked for, on the host."""
    found: list[TokenLogprobs | None] = [None] * len(requests)
    if sampled.logprobs is None or sampled.top_logprobs is None or sampled.top_ids is None:
        return found
    chosen, values, ids = sampled.logprobs.tolist(), sampled.top_logprobs.tolist(), sampled.top_ids.tolist()
    for entry, row in enumerate(sampled.reported):
        count = requests[row].params.logprobs
        top = tuple(zip(ids[entry][:count], values[entry][:count], strict=True))
        found[row] = TokenLogprobs(chosen[entry], top)
    return found


# ---------------------------------------------------------------------- what changes the scores


def _adjust(raw: Tensor, work: _Work, masks: TokenMasks | None) -> Tensor:
    """Penalties, endings that may not come yet, and what grammars forbid: [S, vocab] -> [S, vocab], `raw` itself
    if none apply."""
    if not work.penalised and not work.too_early and masks is None:
        return raw
    scores = raw.clone()
    if work.penalised:
        _penalise(scores, work.penalised)
    if work.too_early:
        rows, token_ids = torch.tensor(work.too_early, device=raw.device).unbind(dim=1)
        scores[rows, token_ids] = -torch.inf
    if masks is not None:
        _forbid(scores, masks)
    return scores


def _forbid(scores: Tensor, masks: TokenMasks) -> None:
    """Minus infinity, in place, for the tokens of [S, vocab] whose bit is not set."""
    rows = torch.tensor(masks.rows, device=scores.device)
    # By bytes, each of which stands for one of 256 rows of eight bounds: many times as fast as bit by bit.
    bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    bounds = torch.where(bits > 0, torch.inf, -torch.inf).to(scores.device)
    words = masks.words.to(scores.device).view(torch.uint8).flatten().int()
    highest = bounds.index_select(0, words).view(len(rows), -1)
    # A tokenizer may have more ids than the model. The smaller of a NaN and anything is NaN.
    scores[rows] = torch.minimum(scores[rows], highest[:, : scores.shape[-1]])


def _penalise(scores: Tensor, penalised: Sequence[tuple[int, SamplingParams, TokenCounts]]) -> None:
    """Penalties of some rows of [S, vocab], in place, all of them at once: an entry for each token of each row.

    Repetition (Keskar et al. 2019) divides positive and multiplies negative scores of all tokens so far, those of
    the prompt too. Frequency subtracts per occurrence and presence once, for generated tokens only, as OpenAI's do.
    In float64, which holds every penalty a request can name.
    """
    sizes = [len(counts.token_ids) for _, _, counts in penalised]

    def entries(values: list[float]) -> Tensor:
        """[n]: a row's value for each of its entries."""
        return torch.from_numpy(np.repeat(np.array(values), sizes)).to(scores.device)

    rows = entries([row for row, _, _ in penalised])
    token_ids = torch.from_numpy(np.concatenate([counts.token_ids for _, _, counts in penalised]))
    generated = torch.from_numpy(np.concatenate([counts.generated for _, _, counts in penalised]))
    token_ids, generated = token_ids.to(scores.device), generated.to(scores.device)
    factor = entries([params.repetition_penalty for _, params, _ in penalised])
    frequency = entries([params.frequency_penalty for _, params, _ in penalised])
    presence = entries([params.presence_penalty for _, params, _ in penalised])

    values = scores[rows, token_ids].double()
    values = torch.where(values > 0, values / factor, values * factor).float().double()
    penalties = torch.where(generated > 0, frequency * generated + presence, 0.0)
    scores[rows, token_ids] = (values - penalties).float()


# ---------------------------------------------------------------------- drawing


class _Settings(NamedTuple):
    """What decides a draw beside the scores: [R, 1] each, float64."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor

    @classmethod
    def of(cls, requests: Sequence[Request], vocab: int, device: torch.device) -> _Settings:
        """One row of numbers a request, brought to the device in one piece."""
        table = [
            (
                min(max(request.params.temperature, COLDEST), HOTTEST),
                min(request.params.top_k or vocab, vocab),
                request.params.top_p if request.params.top_p < 1.0 else math.inf,  # which no sum reaches
                request.params.min_p,
                request.next_uniform(),
            )
            for request in requests
        ]
        return cls(*torch.tensor(table, dtype=torch.float64).to(device).unsqueeze(2).unbind(1))

    def at(self, rows: Tensor) -> _Settings:
        return _Settings(*(column[rows] for column in self))


def _below(best: Tensor, scores: Tensor) -> Tensor:
    """How far each score lies below its row's best, [R], [R, vocab] -> [R, vocab]: from minus infinity to 0.

    A softmax sees nothing else of them. Infinite scores are all best; a row without a token becomes all zeros.
    """
    return (scores - best.unsqueeze(1)).nan_to_num_(nan=0.0, neginf=-torch.inf)


def _draw(scores: Tensor, requests: Sequence[Request]) -> Tensor:
    """One sampled token per row: [R, vocab], each row's best 0 -> [R]."""
    vocab, device = scores.shape[-1], scores.device
    settings = _Settings.of(requests, vocab, device)
    # To read whether a few candidates suffice is to wait for the device. A GPU sorts well, and is not kept waiting.
    candidates = min(FIRST_CANDIDATES, vocab) if device.type == "cpu" else vocab
    # A row's own parameters decide its path, so that neighbours cannot: only top-k and top-p need an order.
    needs_order = [request.params.top_k is not None or request.params.top_p < 1.0 for request in requests]
    drawn = torch.empty(len(requests), dtype=torch.int64, device=device)
    for ordered in (False, True):
        group = [row for row, needed in enumerate(needs_order) if needed is ordered]
        if not group:
            continue
        rows = torch.tensor(group, device=device)
        own_scores, own_settings = scores[rows], settings.at(rows)
        probabilities = (own_scores / own_settings.temperature.float()).softmax(dim=-1)
        if ordered:  # by the scores before the temperature: a huge one leaves no differences
            drawn[rows] = _draw_ordered(own_scores, probabilities, own_settings, candidates)
        else:
            drawn[rows] = _pick(probabilities, own_settings)
    return drawn


def _draw_ordered(scores: Tensor, probabilities: Tensor, settings: _Settings, candidates: int) -> Tensor:
    """One token per row under top-k and top-p: [R, vocab], [R, vocab] -> [R].

    From the `candidates` most likely tokens, and from all of them in rows where those do not suffice. Which of the
    two it was changes no bit: probabilities, and sums of them up to a rank, are the same whatever comes after it.
    """
    vocab = scores.shape[-1]
    ids, complete = _most_likely(scores, candidates)
    kept, suffice = _keep_first(probabilities.gather(1, ids), complete, vocab, settings)
    drawn = ids.gather(1, _pick(kept, settings).unsqueeze(1)).squeeze(1)
    if candidates < vocab and not suffice.all():
        rows = (~suffice).nonzero().squeeze(1)
        drawn[rows] = _draw_ordered(scores[rows], probabilities[rows], settings.at(rows), vocab)
    return drawn


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
    total = cdf[:, -1:].contiguous()
    picked = torch.searchsorted(cdf, settings.uniform * total, right=True)
    # Rounding can put the target on the total itself: the entry that completes the sum is meant then.
    return torch.minimum(picked, torch.searchsorted(cdf, total)).squeeze(1)
