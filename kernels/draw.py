"""Draws a token from each row of scores on a GPU: temperature, top-k, top-p, min-p and the choice, in one launch.

Top-k and top-p keep the best tokens of a row, so they suggest a sort. But a sort of 128,256 scores writes them, and
their indices, several times. A cut needs only the score at which the kept tokens end, and that can be searched for
by reading alone:

```text
  goal: 90 % of the sum of all weights             scores below the best, as integers (keys)
      0 ........................................................... 2^31
      |---- weights of keys up to the pivot: 97 % ----| pivot        more than the goal: search on the left
      |-- 71 % --| pivot                                             less: search on the right
      ...                                                            until one key is left
```

A non-negative float32 orders like its bits, so a key is the bits of `best - score`: 0 for the best token, at most
31 bits long. Each step of the search moves a bound to a key that occurs, so a search takes about as many steps as
the number of different scores near the cut has bits. Tokens with the same score rank by their ids, as in a stable
sort. The choice itself is a second search, for the key at which the running sum passes the random number, and then
for the right one of the tokens that share the key.

One program computes one row. It reads 128,256 scores 10 to 50 times, more for flat ones, and at most a hundred
times; a GPU's cache should serve most of that. It needs no memory beside the scores, and neither row nor batch
decides how many launches there are. So the launch may be captured.

**The same token as on a CPU** (`common.sampling`) follows from the same weights, unless the random number or the
border of a filter lies within rounding of a sum. Weights may differ in their last bits, since a GPU has its own
exponential. Sums are float64 on both, but here they are added by lanes, and weights are not divided by their total
first. A row's result never depends on other rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.dispatch import HAS_TRITON, device_guard

if HAS_TRITON:
    import triton
    import triton.language as tl

#: The token id of a row that has no token.
NOT_A_TOKEN = -1

#: Columns of a row's settings: temperature (0: greedy), top-k (0: tokens are not ranked), top-p, min-p, uniform.
#: A seat's settings have the column of the first of several random numbers instead of one, and then these numbers.
SETTINGS = 5

#: The most scores that a program looks at together.
MOST_COLUMNS = 4096


class SeatState(NamedTuple):
    """The state that a device holds between two decode steps for each seat, a sequence's place in the batch.

    Attributes:
        latest: [seats] int64, the latest token.
        positions: [seats] int64, the column of the latest token.
        settings: [seats, 5 + n] float64: temperature, top-k, top-p and min-p as for `draw_triton`, a column c, and
            the random numbers of the tokens drawn at columns c, c + 1, … c + n - 1.
    """

    latest: Tensor
    positions: Tensor
    settings: Tensor


# --- torch ---------------------------------------------------------------------------------------------


def draw_reference(scores: Tensor, settings: Tensor | None = None) -> Tensor:
    """Compute `draw_triton` in torch, row by row and by a sort, with the same arguments and result.

    For reading and for tests. Without Triton, `common.sampling` samples.
    """
    token_ids = torch.full(scores.shape[:1], NOT_A_TOKEN)
    for row, own in enumerate(scores.float().cpu()):
        best = own.max()
        if not best > -torch.inf:
            continue  # NaN, or nothing above minus infinity
        given = (0.0,) * SETTINGS if settings is None else settings[row].tolist()
        token_ids[row] = _draw_row(torch.where(own == best, 0.0, own - best), *given)
    return token_ids.to(scores.device)


def _draw_row(
    below: Tensor, temperature: float, top_k: float, top_p: float, min_p: float, uniform: float
) -> Tensor:
    """Draw a token from one row. Returns its id, [].

    Args:
        below: [vocab], the row's scores minus its best score.
        temperature, top_k, top_p, min_p, uniform: the row of `settings` that `draw_triton` describes.
    """
    if temperature == 0.0:
        return below.argmax()
    ids = torch.arange(len(below)) if top_k == 0 else below.argsort(descending=True, stable=True)
    weights = (below[ids] / torch.tensor(temperature).float()).exp()
    kept = ids if top_k == 0 else ids[: int(top_k)]
    if top_k and math.isfinite(top_p):
        sums = weights[: len(kept)].double().cumsum(0)
        kept = kept[: 1 + int((sums[:-1] < top_p * sums[-1]).sum())]
    weights = weights[: len(kept)]
    weights = torch.where(weights >= torch.tensor(min_p).float(), weights, 0.0)
    sums = weights.double().cumsum(0)
    picked = torch.searchsorted(sums, uniform * sums[-1:], right=True)
    return kept[torch.minimum(picked, torch.searchsorted(sums, sums[-1:]))[0]]


# --- Triton --------------------------------------------------------------------------------------------

if HAS_TRITON:

    @triton.jit
    def _keys(row_ptr, columns, mask, best):  # type: ignore[no-untyped-def]  # Triton has no types
        """Load scores and return their keys: the bits of the distance to the best score. Infinite where masked."""
        scores = tl.load(row_ptr + columns, mask=mask, other=float("-inf")).to(tl.float32)
        return tl.where(scores == best, 0.0, best - scores).to(tl.int32, bitcast=True)

    @triton.jit
    def _weights(keys, temperature, floor):  # type: ignore[no-untyped-def]  # Triton has no types
        """Return the weights of tokens by their keys, in float64: 1 for the best, 0 below `floor`."""
        below = -keys.to(tl.float32, bitcast=True)
        # Not `/`, which makes NaN of infinity and a huge temperature. Both operands must have one shape.
        weights = tl.exp(tl.math.div_rn(below, tl.where(below > float("-inf"), temperature, 1.0)))
        return tl.where(weights >= floor, weights, 0.0).to(tl.float64)

    @triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
    def _measure(  # type: ignore[no-untyped-def]  # Triton has no types
        row_ptr, vocab, best, temperature, floor, limit, counts: tl.constexpr, tile: tl.constexpr
    ):
        """Return the sum of weights (or the number) of the tokens with keys up to `limit`, the largest of these
        keys, and the smallest key beyond."""
        columns = tl.arange(0, tile)
        sums = tl.zeros([tile], tl.float64)
        within = tl.full([tile], -1, tl.int32)
        beyond = tl.full([tile], 0x7FFFFFFF, tl.int32)
        for start in range(0, vocab, tile):
            mask = start + columns < vocab
            keys = _keys(row_ptr, start + columns, mask, best)
            inside = mask & (keys <= limit)
            if counts:
                sums += inside.to(tl.float64)
            else:
                sums += tl.where(inside, _weights(keys, temperature, floor), 0.0)
            within = tl.maximum(within, tl.where(inside, keys, -1))
            beyond = tl.minimum(beyond, tl.where(mask & (keys > limit), keys, 0x7FFFFFFF))
        return tl.sum(sums, axis=0), tl.max(within, axis=0), tl.min(beyond, axis=0)

    @triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
    def _search(  # type: ignore[no-untyped-def]  # Triton has no types
        row_ptr, vocab, best, temperature, floor, goal, high, counts: tl.constexpr, tile: tl.constexpr
    ):
        """Find the token, in order of rank, with which the running sum of weights (or the number) passes `goal`.

        Returns its key, at most `high`, and its rank among the tokens with that key, from 1 on, in float64.
        """
        low = high * 0
        before = goal * 0.0  # the sum of smaller keys than `low`
        while low < high:
            pivot = low + (high - low) // 2
            total, within, beyond = _measure(row_ptr, vocab, best, temperature, floor, pivot, counts, tile)
            found = total > goal
            high = tl.where(found, within, high)
            low = tl.where(found, low, beyond)
            before = tl.where(found, before, total)
        unit = before * 0.0 + 1.0
        if not counts:
            unit = _weights(low, temperature, floor)
        rank = tl.floor((goal - before) / tl.where(unit > 0.0, unit, 1.0)) + 1.0
        # The quotient is rounded, so a neighbouring rank may be the right one.
        rank = tl.where(before + (rank - 1.0) * unit > goal, rank - 1.0, rank)
        rank = tl.where(before + rank * unit <= goal, rank + 1.0, rank)
        return low, tl.maximum(rank, 1.0)

    @triton.jit
    def _previous(x):  # type: ignore[no-untyped-def]  # Triton has no types
        """Return the float64 before x > 0. So `y > _previous(x)` means `y >= x`."""
        return x - x * 1.1102230246251565e-16  # 2^-53

    @triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
    def _at_rank(row_ptr, vocab, best, key, rank, tile: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton has no types
        """Return the id of the token of some rank, from 1 on, among the tokens with a key; the last one if there
        are fewer."""
        columns = tl.arange(0, tile)
        token = key * 0 - 1
        last = token
        seen = key * 0
        for start in range(0, vocab, tile):
            mask = start + columns < vocab
            equal = mask & (_keys(row_ptr, start + columns, mask, best) == key)
            ranks = seen + tl.cumsum(equal.to(tl.int32), 0)
            token = tl.maximum(token, tl.max(tl.where(equal & (ranks == rank), start + columns, -1), axis=0))
            last = tl.maximum(last, tl.max(tl.where(equal, start + columns, -1), axis=0))
            seen += tl.sum(equal.to(tl.int32), axis=0)
        return tl.where(token < 0, last, token)

    @triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
    def _draw_ranked(  # type: ignore[no-untyped-def]  # Triton has no types
        row_ptr, vocab, best, temperature, top_k, top_p, floor, uniform, tile: tl.constexpr
    ):
        """Sample a row's token by inverse CDF, in order of rank.

        Top-k, top-p and min-p remove tokens first. Returns the first token whose running sum of weights passes
        `uniform` times the total.
        """
        infinite = 0x7F800000  # the largest key
        total, key, _ = _measure(row_ptr, vocab, best, temperature, 0.0, infinite, False, tile)
        rank = total * 0.0 + vocab  # among the tokens with that key, the last that is kept
        if top_k < vocab:
            key, rank = _search(row_ptr, vocab, best, temperature, 0.0, top_k - 0.5, key, True, tile)
            total, _, _ = _measure(row_ptr, vocab, best, temperature, 0.0, key - 1, False, tile)
            total += rank * _weights(key, temperature, 0.0)
        if top_p <= 1.0:
            goal = _previous(top_p * total)
            cut, last = _search(row_ptr, vocab, best, temperature, 0.0, goal, key, False, tile)
            rank = tl.where(cut == key, tl.minimum(last, rank), last)
            key = cut
        total, _, _ = _measure(row_ptr, vocab, best, temperature, floor, key - 1, False, tile)
        total += rank * _weights(key, temperature, floor)
        most, _, _ = _measure(row_ptr, vocab, best, temperature, floor, key, False, tile)
        total = tl.minimum(total, most)  # `rank` may exceed the number of tokens with this key
        goal = tl.minimum(uniform * total, _previous(total))
        chosen, place = _search(row_ptr, vocab, best, temperature, floor, goal, key, False, tile)
        place = tl.where(chosen == key, tl.minimum(place, rank), place)
        return _at_rank(row_ptr, vocab, best, chosen, tl.minimum(place, vocab).to(tl.int32), tile)

    @triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
    def _draw_unranked(row_ptr, vocab, best, temperature, floor, uniform, tile: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton has no types
        """Return the token at which the running sum, by id, of the weights that min-p keeps passes `uniform` times
        its total."""
        columns = tl.arange(0, tile)
        total = uniform * 0.0
        for start in range(0, vocab, tile):
            keys = _keys(row_ptr, start + columns, start + columns < vocab, best)
            total += tl.sum(_weights(keys, temperature, floor), axis=0)
        goal = tl.minimum(uniform * total, _previous(total))
        reached = uniform * 0.0
        before = reached
        place = vocab * 0  # where the tile begins in which the sum passes the goal
        for start in range(0, vocab, tile):
            keys = _keys(row_ptr, start + columns, start + columns < vocab, best)
            after = reached + tl.sum(_weights(keys, temperature, floor), axis=0)
            here = (reached <= goal) & (after > goal)
            place = tl.where(here, start, place)
            before = tl.where(here, reached, before)
            reached = after
        columns += place
        weights = _weights(_keys(row_ptr, columns, columns < vocab, best), temperature, floor)
        passed = (before + tl.cumsum(weights, 0) > goal) & (weights > 0.0)
        token = tl.min(tl.where(passed, columns, 0x7FFFFFFF), axis=0)
        # If a rounded sum passes the goal nowhere, the last token that adds to it completes it.
        return tl.minimum(token, tl.max(tl.where(weights > 0.0, columns, -1), axis=0))

    @triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
    def _draw_kernel(  # type: ignore[no-untyped-def]  # Triton has no types
        scores_ptr,
        settings_ptr,
        seats_ptr,
        columns_ptr,
        latest_ptr,
        positions_ptr,
        out_ptr,
        row_stride,
        settings_stride,
        vocab,
        has_settings: tl.constexpr,
        by_seat: tl.constexpr,
        tile: tl.constexpr,
    ):
        """Program i draws the token of row i. With `by_seat`, it also moves the row's seat on by a token."""
        row = tl.program_id(0).to(tl.int64)  # 64-bit: row * stride passes 2^31
        row_ptr = scores_ptr + row * row_stride
        columns = tl.arange(0, tile)
        tops = tl.full([tile], float("-inf"), tl.float32)
        ids = tl.zeros([tile], tl.int32)
        broken = tl.zeros([tile], tl.int32)
        for start in range(0, vocab, tile):
            mask = start + columns < vocab
            scores = tl.load(row_ptr + start + columns, mask=mask, other=float("-inf")).to(tl.float32)
            ids = tl.where(scores > tops, start + columns, ids)
            tops = tl.where(scores > tops, scores, tops)
            broken |= (scores != scores).to(tl.int32)
        best = tl.max(tops, axis=0)
        token = tl.min(tl.where(tops == best, ids, 0x7FFFFFFF), axis=0)
        valid = (tl.max(broken, axis=0) == 0) & (best > float("-inf"))
        if has_settings:
            settings = settings_ptr + (tl.load(seats_ptr + row) if by_seat else row) * settings_stride
            temperature = tl.load(settings).to(tl.float32)
            if valid & (temperature > 0.0):
                top_k = tl.load(settings + 1)
                floor = tl.load(settings + 3).to(tl.float32)
                if by_seat:
                    first = tl.load(settings + 4).to(tl.int64)
                    uniform = tl.load(settings + 5 + tl.load(columns_ptr + row) - first)
                else:
                    uniform = tl.load(settings + 4)
                if top_k > 0.0:
                    top_p = tl.load(settings + 2)
                    token = _draw_ranked(
                        row_ptr, vocab, best, temperature, top_k, top_p, floor, uniform, tile
                    )
                else:
                    token = _draw_unranked(row_ptr, vocab, best, temperature, floor, uniform, tile)
        tl.store(out_ptr + row, tl.where(valid, token, -1).to(tl.int64))
        if by_seat:
            # Rows that only fill a captured graph have the seat of another row, and write the same values.
            seat = tl.load(seats_ptr + row)
            tl.store(latest_ptr + seat, tl.where(valid, token, 0).to(tl.int64))
            tl.store(positions_ptr + seat, tl.load(columns_ptr + row) + 1)


def draw_triton(scores: Tensor, settings: Tensor | None = None) -> Tensor:
    """Draw a token from each row, in one launch. Nothing here waits for the device.

    Args:
        scores: [S, vocab], any float type: after biases, penalties and masks. The best may be infinite, and others
            minus infinity.
        settings: [S, 5] float64, for each row: temperature, top-k, top-p, min-p, and a number in [0, 1) that
            decides. A temperature of 0 takes the best token, the first among equals. With top-k 0, weights are
            summed by token id, and top-p is not read. Otherwise top-k is in 1 to vocab, and weights are summed by
            rank, the best first. A top-p above 1 filters nothing. None: all rows take the best token.

    Returns:
        [S] int64, `NOT_A_TOKEN` for a row that has a NaN, or nothing above minus infinity.
    """
    return _launch(scores, None if settings is None else settings.contiguous(), None, None)


def draw_at_seats_triton(scores: Tensor, state: SeatState, seats: Tensor, columns: Tensor) -> Tensor:
    """Draw a token for each row of a decode step, and update the state of the rows' seats, in one launch.

    Args:
        scores: as for `draw_triton`.
        state: the drawn tokens are written to `latest` (0 for a row without a token), and `columns` + 1 to
            `positions`.
        seats: [S] int64, the seat of each row.
        columns: [S] int64, the column of each row's token. Not `state.positions` itself, which the launch writes.

    Returns:
        [S] int64, as from `draw_triton`.
    """
    return _launch(scores, state.settings, state, (seats, columns))


def _launch(
    scores: Tensor, settings: Tensor | None, state: SeatState | None, rows: tuple[Tensor, Tensor] | None
) -> Tensor:
    count, vocab = scores.shape
    out = torch.empty(count, dtype=torch.int64, device=scores.device)
    if count == 0:
        return out  # nothing to launch
    seats, columns = rows or (None, None)
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    tile = min(MOST_COLUMNS, triton.next_power_of_2(vocab))
    with device_guard(scores):
        _draw_kernel[(count,)](
            scores,
            settings,
            seats,
            columns,
            None if state is None else state.latest,
            None if state is None else state.positions,
            out,
            scores.stride(0),
            0 if settings is None else settings.stride(0),
            vocab,
            has_settings=settings is not None,
            by_seat=state is not None,
            tile=tile,
            num_warps=max(1, tile // 256),
        )
    return out
