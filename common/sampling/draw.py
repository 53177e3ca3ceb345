"""Samples the next tokens of all sequences of a pass at once.

A greedy row takes the token with the highest score, after biases, penalties and masks. Any other row draws one
number `u` in [0, 1) from its request's own CPU generator. The row takes the token at which the running sum of the
probabilities, after temperature and filters, first exceeds `u`.

```text
logits ─> biases ─> penalties ─> tokens not allowed now
       ─> temperature ─> top-k ─> top-p ─> min-p ─> inverse CDF(u)
```

On a CPU, top-k and top-p sort tokens. Of 100,000 tokens the thousand most likely are almost always enough, and
finding them is ten times as fast as sorting all. On a GPU with Triton nothing is sorted: kernels search for the cut
(`kernels.draw`).

The same logits and seed give the same token on every device, alone or in any batch, unless the random number or a
filter's border lies within rounding of the border between two tokens. The logits themselves may differ by rounding,
and the rounding may depend on the other sequences of the pass. In float32 the difference is too small to change a
token, unless two tokens are almost equally likely. In bfloat16 and float16 the difference can change a token.

Limits: tokens with a logit of plus infinity share the whole probability. Tokens with a logit of minus infinity are
never chosen. A temperature beyond float32 makes all tokens but these equally likely. A row that contains a NaN, or
only minus infinity, has no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from common.request import Request, TokenLogprobs
from common.sampling.inputs import SamplingInputs, TokenMasks
from kernels import NOT_A_TOKEN
from kernels.dispatch import use_triton
from kernels.draw import draw_triton

#: Number of most likely tokens that are sorted first. Of 128,256 tokens, one thread found 256 in 0.3 ms and 1,024
#: in 0.6 ms, and sorted all in 13 ms. Finding 1,024 instead of 256 pays off if the full sort is then avoided in one
#: more row of forty.
FIRST_CANDIDATES = 1024


class Sampled(NamedTuple):
    """The sampled tokens of one pass, and the log-probabilities that requests asked for.

    Attributes:
        token_ids: [S] int64, `NOT_A_TOKEN` where a row had a NaN, or no score above minus infinity.
        logprobs: [L] float32, of the sampled tokens under the model's own distribution, for the L rows that
            requested them, in order; None if no row did.
        top_logprobs, top_ids: [L, n], log-probabilities and ids of the n most likely tokens of these rows; n is the
            largest number requested.
    """

    token_ids: Tensor
    logprobs: Tensor | None = None
    top_logprobs: Tensor | None = None
    top_ids: Tensor | None = None


def sample(logits: Tensor, requests: Sequence[Request], masks: TokenMasks | None = None) -> Sampled:
    """Sample a token for each row.

    Args:
        logits: [S, vocab] float32; not changed.
        requests: the request of each of the S rows.
        masks: the masks of the rows that have one; None: no row has one.
    """
    return choose(logits, SamplingInputs.of(requests, masks, logits.shape[-1], logits.device))


def choose(logits: Tensor, inputs: SamplingInputs) -> Sampled:
    """Sample a token for each row of `logits` [S, vocab] float32. Calls operators only, so that a tape
    (`kernels.tape`) can record it.

    Phases 4 to 8 call this function through `sample`. `PipelinedRunner` of phases 9 and 10 also calls it directly.
    """
    scores = _adjust(logits, inputs)
    if use_triton(scores):
        token_ids = draw_triton(scores, inputs.settings, ranked=inputs.ordered is not None)
    else:
        best, token_ids = scores.max(dim=-1)
        valid = best > -torch.inf  # False for NaN too: a row's maximum is NaN if any entry is
        token_ids = torch.where(valid, _draw(scores, best, token_ids, inputs), NOT_A_TOKEN)
    return (
        Sampled(token_ids)
        if inputs.reported is None
        else _report(logits, token_ids, inputs.reported, inputs.top)
    )


def _report(logits: Tensor, token_ids: Tensor, reported: Tensor, top: int) -> Sampled:
    """Add log-probabilities to sampled tokens.

    Args:
        logits: [S, vocab].
        token_ids: [S], the sampled tokens.
        reported: [L], indices of the rows whose log-probabilities are returned.
        top: number of most likely tokens that are returned for each of these rows.
    """
    raw = logits[reported]
    logprobs = _below(raw.amax(dim=-1), raw).log_softmax(dim=-1)
    values, ids = logprobs.topk(top, dim=-1)
    picked = logprobs.gather(-1, token_ids[reported].clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return Sampled(token_ids, picked, values, ids)


def read_logprobs(sampled: Sampled, requests: Sequence[Request]) -> list[TokenLogprobs | None]:
    """Copy the log-probabilities to the host. Returns an entry for each sampled row; None: its request wants none.

    Args:
        sampled: the sampled rows.
        requests: the request of each row.
    """
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


# ---------------------------------------------------------------------- biases, penalties and masks


def _adjust(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """Apply biases, penalties and masks to logits, and forbid EOS and stop tokens that are held back.

    [S, vocab] -> [S, vocab]. If nothing applies to any row, returns `logits` itself.
    """
    given = inputs.biases, inputs.penalties, inputs.held_back, inputs.masked
    if all(each is None for each in given):
        return logits
    scores = logits
    if inputs.biased is not None and inputs.biases is not None:
        scores = scores.index_put(inputs.biased.unbind(), inputs.biases, accumulate=True)
    if inputs.penalised is not None and inputs.penalties is not None:
        entries = inputs.penalised
        if inputs.unread is not None and inputs.unread_ids is not None:
            entries = _with_unread(entries, inputs.unread, inputs.unread_ids, inputs.penalties)
        scores = _penalise(scores, entries, inputs.penalties)
    if inputs.held_back is not None:
        scores = scores.index_put(inputs.held_back.unbind(), scores.new_full((), -torch.inf))
    if inputs.masked is not None and inputs.words is not None:
        scores = _mask(scores, inputs.masked, inputs.words)
    return scores


def _mask(scores: Tensor, rows: Tensor, words: Tensor) -> Tensor:
    """Return scores [S, vocab] in which forbidden tokens have minus infinity.

    Args:
        scores: [S, vocab].
        rows: [C], indices of the rows that have a mask.
        words: [C, W], their masks. A token is forbidden if its bit is not set.
    """
    # A table of 256 rows expands a byte into eight bounds, which is many times as fast as single bits.
    bits = torch.arange(256, device=scores.device).unsqueeze(1) >> torch.arange(8, device=scores.device) & 1
    bounds = torch.where(bits > 0, torch.inf, -torch.inf)
    highest = bounds.index_select(0, words.view(torch.uint8).flatten().int()).view(-1, 32 * words.shape[1])
    # A tokenizer may have more ids than the model. The smaller of a NaN and anything is NaN.
    return scores.index_copy(0, rows, torch.minimum(scores[rows], highest[:, : scores.shape[-1]]))


def _penalise(scores: Tensor, entries: Tensor, penalties: Tensor) -> Tensor:
    """Apply all penalties to scores [S, vocab]. `entries` are those of `SamplingInputs.penalised`.

    Repetition (Keskar et al. 2019) divides positive and multiplies negative scores of all tokens so far, including
    the prompt. Frequency is subtracted for each occurrence and presence once, for generated tokens only, as in
    OpenAI's API. Computed in float64, since a request's penalty may exceed float32.
    """
    rows, token_ids, generated = entries.unbind()
    factor, frequency, presence = (column[rows] for column in penalties.unbind(1))
    values = scores[rows, token_ids].double()
    values = torch.where(values > 0, values / factor, values * factor).float().double()
    penalty = torch.where(generated > 0, frequency * generated + presence, 0.0)
    return scores.index_put((rows, token_ids), (values - penalty).float())


def _with_unread(entries: Tensor, rows: Tensor, token_ids: Tensor, penalties: Tensor) -> Tensor:
    """Count the latest tokens of R rows, which the host has not read: entries [3, n] -> [3, n + R].

    Entries and penalties are as in `SamplingInputs`; `rows` and `token_ids` are [R]. A latest token that has an
    entry already gets a second one with the same count, so both lead to the same score.
    """
    latest = torch.full_like(penalties[:, 0], -1, dtype=torch.int32).index_copy(0, rows, token_ids.int())
    places, known, generated = entries.unbind()
    again = latest[places] == known
    generated = generated + again
    counts = torch.zeros_like(latest).index_put((places,), generated * again, accumulate=True)
    added = torch.stack([rows.int(), token_ids.int(), counts[rows].clamp(min=1)])
    return torch.cat([torch.stack([places, known, generated]), added], dim=1)


# ---------------------------------------------------------------------- drawing


class _Settings(NamedTuple):
    """Temperature, filters and random number of R sampled rows: [R, 1] each, float64."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor

    @classmethod
    def at(cls, table: Tensor, rows: Tensor) -> _Settings:
        """Return the settings in some rows of a table [S, 5]."""
        return cls(*table[rows].unsqueeze(2).unbind(1))


def _below(best: Tensor, scores: Tensor) -> Tensor:
    """Subtract each row's best score: [R], [R, vocab] -> [R, vocab], with values from minus infinity to 0.

    This does not change a softmax. Scores of plus infinity become 0, and so do all scores of a row that has a NaN
    or only minus infinity.
    """
    return (scores - best.unsqueeze(1)).nan_to_num_(nan=0.0, neginf=-torch.inf)


def _draw(scores: Tensor, best: Tensor, token_ids: Tensor, inputs: SamplingInputs) -> Tensor:
    """Sample a token for each row that is not greedy. Returns the tokens of all rows [S].

    Args:
        scores: [S, vocab].
        best: [S], the highest score of each row.
        token_ids: [S], the tokens with these scores. Greedy rows keep them.
        inputs: the sampling parameters of the rows.
    """
    if inputs.settings is None:
        return token_ids
    if inputs.unordered is not None:
        rows = inputs.unordered
        settings = _Settings.at(inputs.settings, rows)
        own = _below(best[rows], scores[rows])
        token_ids = token_ids.index_copy(0, rows, _pick(_heated(own, settings), settings))
    if inputs.ordered is not None:
        rows = inputs.ordered
        settings = _Settings.at(inputs.settings, rows)
        own = _below(best[rows], scores[rows])
        token_ids = token_ids.index_copy(0, rows, _draw_ordered(own, _heated(own, settings), settings))
    return token_ids


def _heated(scores: Tensor, settings: _Settings) -> Tensor:
    """Return the rows' probabilities, after dividing scores by the temperatures: [R, vocab] -> [R, vocab]."""
    return (scores / settings.temperature.float()).softmax(dim=-1)


def _draw_ordered(scores: Tensor, probabilities: Tensor, settings: _Settings) -> Tensor:
    """Sample a token for each row that has top-k or top-p: [R, vocab], [R, vocab] -> [R].

    On a CPU, sorts only the most likely tokens (`FIRST_CANDIDATES`), and all tokens in rows where these do not
    suffice. Both ways give the same bits: the sum of probabilities up to a rank does not depend on later ranks.
    Tokens are sorted by their scores before the temperature, since a huge temperature makes all probabilities
    equal.

    Args:
        scores: [R, vocab], the scores minus the best score of their row.
        probabilities: [R, vocab], at the rows' temperatures.
        settings: of these rows.
    """
    vocab = scores.shape[-1]
    # Finding the rows that need more candidates reads from the device. On a GPU without Triton, the host would wait
    # until all passes in flight are done, so all rows are sorted whole.
    candidates = min(FIRST_CANDIDATES, vocab) if scores.device.type == "cpu" else vocab
    drawn, suffice = _draw_from_first(scores, probabilities, settings, candidates)
    if candidates == vocab:
        return drawn
    rows = (~suffice).nonzero().squeeze(1)  # usually empty
    settings = _Settings(*(column[rows] for column in settings))
    return drawn.index_copy(0, rows, _draw_from_first(scores[rows], probabilities[rows], settings, vocab)[0])


def _draw_from_first(
    scores: Tensor, probabilities: Tensor, settings: _Settings, count: int
) -> tuple[Tensor, Tensor]:
    """Sample a token of each row from its `count` most likely tokens.

    Returns the tokens [R], and for each row whether `count` tokens were enough [R].
    """
    ids, complete = _most_likely(scores, count)
    kept, suffice = _keep_first(probabilities.gather(1, ids), complete, scores.shape[-1], settings)
    return ids.gather(1, _pick(kept, settings).unsqueeze(1)).squeeze(1), suffice


def _most_likely(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Find the `count` tokens with the highest scores of each row [R, vocab].

    Returns:
        The ids of these tokens [R, count], in descending order of scores, and by id if scores are equal. And how
        many leading ids [R, 1] are certain to equal those of a sort of the whole row. The ids after them have the
        same score as the last id, and other tokens with this score may be missing.
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
    """Apply top-k, then apply top-p (nucleus sampling, Holtzman et al. 2019) to the tokens that remain.

    Args:
        probabilities: [R, n], of each row's most likely tokens, in descending order.
        complete: [R, 1], how many leading tokens of each row are certain to equal those of a full sort.
        vocab: size of the vocabulary.
        settings: of these rows.

    Returns:
        The probabilities [R, n] with 0 for filtered tokens, and for each row whether all kept tokens are among its
        first `complete` tokens [R].
    """
    ranks = torch.arange(probabilities.shape[-1], device=probabilities.device)
    top_k = settings.top_k.long()
    sums = probabilities.cumsum(dim=-1, dtype=torch.float64)
    everything = top_k == vocab
    total = torch.where(everything, 1.0, sums.gather(1, top_k.clamp(max=len(ranks)) - 1))
    enough = settings.top_p * total
    # A token is kept if the sum before it is below `enough`. The first token is always kept.
    kept = (ranks < top_k) & F.pad(sums[:, :-1] < enough, (1, 0), value=True)
    reached = (complete > 0) & (sums.gather(1, (complete - 1).clamp(min=0)) >= enough)
    suffice = torch.where(everything, reached, top_k <= complete)
    return probabilities.masked_fill(~kept, 0.0), suffice.squeeze(1)


def _pick(probabilities: Tensor, settings: _Settings) -> Tensor:
    """Apply min-p. Returns the index where the running sum first exceeds `uniform` × the total: [R, n] -> [R].

    Sums are float64: in float32, a sum of 100,000 small entries would lose the end of the distribution.
    """
    floor = settings.min_p.float() * probabilities.amax(dim=-1, keepdim=True)
    cdf = probabilities.masked_fill(probabilities < floor, 0.0).cumsum(dim=-1, dtype=torch.float64)
    total = cdf[:, -1:].clone()  # not `contiguous`, whose copy a recording of one row would lack
    picked = torch.searchsorted(cdf, settings.uniform * total, right=True)
    # If rounding puts the target on the total itself, take the entry that completes the sum.
    return torch.minimum(picked, torch.searchsorted(cdf, total)).squeeze(1)
