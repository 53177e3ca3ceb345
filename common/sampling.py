"""Choosing the next tokens of all sequences of a pass at once.

Greedy rows take the most likely token. A sampled row draws one number `u` in [0, 1) from its request's own CPU
generator and inverts the cumulative distribution that temperature and filters leave: the token at which the running
sum of probabilities first exceeds `u`.

```text
logits ─> penalties ─> tokens not allowed yet ─> temperature ─> top-k ─> top-p ─> min-p ─> inverse CDF(u)
```

So the same logits and seed give the same token on every device, alone or in any batch. The logits are the same up
to rounding, which depends on who shares a pass: in float32 too little to change a token (unless two are all but
equally likely), in bfloat16 and float16 enough to.

Where numbers end: tokens of infinite logits share the whole probability, those of minus infinity are never chosen,
and a temperature beyond float32 makes all others equally likely. A row with a NaN in it, or with nothing but minus
infinity, has no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.request import Request, TokenLogprobs

#: The id reported for a row whose logits allow no token.
NOT_A_TOKEN = -1

#: What temperatures are kept within: above 0, and within float32.
COLDEST, HOTTEST = 1e-5, torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Sampled:
    """One pass's choice, still on the device.

    Attributes:
        token_ids: [S] int64, `NOT_A_TOKEN` where a row had a NaN, or no score above minus infinity.
        logprobs: [S] float32 of the chosen tokens under the model's own distribution; None if nobody asked.
        top_logprobs, top_ids: [S, n] the most likely tokens, n the largest number asked for.
    """

    token_ids: Tensor
    logprobs: Tensor | None = None
    top_logprobs: Tensor | None = None
    top_ids: Tensor | None = None


def sample(logits: Tensor, requests: Sequence[Request]) -> Sampled:
    """Choose a token for each row.

    Args:
        logits: [S, vocab], any float type; not changed.
        requests: S of them, row by row.
    """
    raw = logits.float()
    scores = _adjust(raw, requests)
    best, token_ids = scores.max(dim=-1)
    valid = best > -torch.inf  # a maximum is NaN where any entry is: no second look at the whole vocabulary
    sampled_rows = [row for row, request in enumerate(requests) if not request.params.greedy]
    if sampled_rows:
        rows = torch.tensor(sampled_rows, device=logits.device)
        chosen = [requests[row] for row in sampled_rows]
        token_ids[rows] = _draw(_below(best[rows], scores[rows]), chosen)
    token_ids = torch.where(valid, token_ids, NOT_A_TOKEN)
    wanted = [r.params.logprobs for r in requests if r.params.logprobs is not None]
    if not wanted:
        return Sampled(token_ids)
    logprobs = _below(raw.amax(dim=-1), raw).log_softmax(dim=-1)
    top = logprobs.topk(min(max(wanted), logprobs.shape[-1]), dim=-1)
    picked = logprobs.gather(-1, token_ids.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return Sampled(token_ids, picked, top.values, top.indices)


def read_logprobs(sampled: Sampled, requests: Sequence[Request]) -> list[TokenLogprobs | None]:
    """The log-probabilities each request asked for, on the host."""
    if sampled.logprobs is None or sampled.top_logprobs is None or sampled.top_ids is None:
        return [None] * len(requests)
    chosen, values, ids = sampled.logprobs.tolist(), sampled.top_logprobs.tolist(), sampled.top_ids.tolist()
    found: list[TokenLogprobs | None] = []
    for row, request in enumerate(requests):
        count = request.params.logprobs
        top = tuple(zip(ids[row][:count], values[row][:count], strict=True))
        found.append(None if count is None else TokenLogprobs(chosen[row], top))
    return found


# ---------------------------------------------------------------------- what changes the scores


def _adjust(raw: Tensor, requests: Sequence[Request]) -> Tensor:
    """Penalties, and the endings that may not come yet: [S, vocab] -> [S, vocab], `raw` itself if none apply."""
    penalised = [row for row, request in enumerate(requests) if request.params.has_penalties]
    early = [
        row
        for row, request in enumerate(requests)
        if request.num_generated_tokens < request.params.min_tokens and request.ending_token_ids
    ]
    if not penalised and not early:
        return raw
    scores = raw.clone()
    for row in penalised:
        _penalise(scores[row], requests[row])
    for row in early:
        scores[row, sorted(requests[row].ending_token_ids)] = -torch.inf
    return scores


def _penalise(scores: Tensor, request: Request) -> None:
    """Penalties of one row, [vocab], in place.

    Repetition (Keskar et al. 2019) divides positive and multiplies negative scores of all tokens so far, those of
    the prompt too. Frequency subtracts per occurrence and presence once, for generated tokens only, as OpenAI's do.
    In float64, which holds every penalty a request can name.
    """
    params = request.params
    if params.repetition_penalty != 1.0:
        seen = torch.unique(torch.tensor(request.token_ids)).to(scores.device)
        values, factor = scores[seen].double(), params.repetition_penalty
        scores[seen] = torch.where(values > 0, values / factor, values * factor).float()
    generated = torch.tensor(request.token_ids[request.num_prompt_tokens :], dtype=torch.int64)
    seen, counts = (each.to(scores.device) for each in torch.unique(generated, return_counts=True))
    penalties = params.frequency_penalty * counts.double() + params.presence_penalty
    scores[seen] = (scores[seen].double() - penalties).float()


# ---------------------------------------------------------------------- drawing


def _below(best: Tensor, scores: Tensor) -> Tensor:
    """How far each score lies below its row's best, [R], [R, vocab] -> [R, vocab]: from minus infinity to 0.

    A softmax sees nothing else of them. Infinite scores are all best; a row without a token becomes all zeros.
    """
    return (scores - best.unsqueeze(1)).nan_to_num_(nan=0.0, neginf=-torch.inf)


def _draw(scores: Tensor, requests: Sequence[Request]) -> Tensor:
    """One sampled token per row: [R, vocab], each row's best 0 -> [R]."""
    device = scores.device

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)

    params = [request.params for request in requests]
    uniforms = torch.tensor([request.next_uniform() for request in requests], dtype=torch.float64)
    drawn = torch.empty(len(requests), dtype=torch.int64, device=device)
    # A row's own parameters decide its path, so that neighbours cannot: only top-k and top-p need an order.
    needs_order = [p.top_k is not None or p.top_p < 1.0 for p in params]
    for ordered in (False, True):
        rows = [row for row, needed in enumerate(needs_order) if needed is ordered]
        if not rows:
            continue
        index = torch.tensor(rows, device=device)
        group = [params[row] for row in rows]
        logits, ids = scores[index], None
        if ordered:  # before the temperature: a huge one leaves no differences to order them by
            logits, ids = logits.sort(dim=-1, descending=True, stable=True)
        logits = logits / column([min(max(p.temperature, COLDEST), HOTTEST) for p in group])
        if ordered:
            top_k = column([p.top_k or logits.shape[-1] for p in group])
            logits = _keep_first(logits, top_k, column([p.top_p for p in group]))
        probabilities = logits.softmax(dim=-1)
        floor = column([p.min_p for p in group]) * probabilities.amax(dim=-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < floor, 0.0)
        picked = _invert_cdf(probabilities, uniforms[rows].to(device)).unsqueeze(1)
        drawn[index] = (picked if ids is None else ids.gather(1, picked)).squeeze(1)
    return drawn


def _keep_first(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Top-k, then the nucleus (Holtzman et al. 2019) of what that leaves.

    [R, vocab] in descending order, [R, 1], [R, 1] -> [R, vocab] with minus infinity in place of the others.
    """
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    logits = logits.masked_fill(ranks >= top_k, -torch.inf)
    probabilities = logits.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    beyond = (before >= top_p) & (ranks > 0)  # what comes after the probability is reached; never the first
    return logits.masked_fill(beyond, -torch.inf)


def _invert_cdf(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """The first entry at which the running sum exceeds `u` of the total: [R, vocab], [R] -> [R].

    Sums are float64: over 100,000 small float32 entries the end of the distribution would be lost.
    """
    cdf = probabilities.double().cumsum(dim=-1)
    target = uniforms.unsqueeze(1) * cdf[:, -1:]
    picked = torch.searchsorted(cdf, target, right=True).squeeze(1)
    # Rounding can put the target on the total itself: the last entry that has any probability is meant then.
    last = cdf.shape[-1] - 1 - (probabilities > 0).flip(-1).int().argmax(dim=-1)
    return torch.minimum(picked, last)
