"""Draws a token from each row of scores on a GPU: temperature, top-k, top-p, min-p and the choice.

Top-k and top-p keep the best tokens of a row, so they suggest a sort. But a sort of 128,256 scores writes them, and
their indices, several times. A cut needs only the score at which the kept tokens end, and that can be searched for
by reading alone:

```text
  goal: 90 % of the sum of all weights                    tokens by their distance to the best score
      0         1/64        2/64        3/64        4/64
      |--- 55 % ---|--- 33 % ---|--- 9 % ---|--- 2 % ---| ...      the sum passes the goal in the third range
                                |-|-|-|-|-|                        and in the second of 512 ranges within it
                                  ...                              until a range is one distance
```

A distance is a non-negative float32, which orders like its bits. These bits, at most 31, are the token's *key*: 0
for the best token. The first step of a search divides tokens into 512 ranges by their distance, because most
tokens' keys begin with the same bits. The other four steps find 9, 9, 9 and 4 bits of the key. Tokens with the same
score rank by their ids, as in a stable sort.

**A step of a search is one launch.** One program looks at a part of a row, and adds the weights of its tokens
(for top-k: their number) to the row's 512 sums. The row's last program to finish chooses the range for the
next step. There are three searches: for the end of top-k, for the end of top-p, and for the token at which
the running sum passes the random number. They take 15 launches, which a captured graph makes cheap. Rows
without top-k and top-p need no search.

**Sums are exact.** Weights are rounded down to multiples of 2^-40, and added as integers. The order of such a sum
does not matter, so programs may add in any order, and a row's result does not depend on other rows. A token whose
weight is below 2^-40 of the best token's weight is never drawn.

**The same token as on a CPU** (`common.sampling.draw`) follows from the same weights, unless the random number
or the
border of a filter lies within rounding of a sum. Weights may differ in their last bits, since a GPU has its own
exponential, and a CPU adds them as float64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import NOT_A_TOKEN
from kernels.dispatch import HAS_TRITON, device_guard
from kernels.overlap import early_launch

if HAS_TRITON:
    import triton
    import triton.language as tl

    from kernels.overlap import wait_for_inputs

#: Number of a row's settings: temperature (0: greedy), top-k (0: tokens are not ranked), top-p, min-p, and a
#: random number. In a seat's settings, a column takes the place of this number, and random numbers follow: see
#: `SeatState`.
SETTINGS = 5

#: The most scores of a row that one program looks at.
MOST_COLUMNS = 2048

#: The best token's weight as an integer. The sum of a million weights fits 64 bits.
UNITS = 2**40

#: Ranges that a step of a search distinguishes.
RANGES = 512
#: Searches of a row: for the end of top-k, for the end of top-p, and for the token. Steps of each.
SEARCHES, STEPS = 3, 5
#: Room for the numbers of a row's state between two steps.
FIELDS = 8


class SeatState(NamedTuple):
    """The state of each seat (a place in the batch) that decode steps read and update on the device.

    Attributes:
        latest: [seats] int64, the latest token of the sequence at each seat.
        positions: [seats] int64, the column of the latest token, valid when a decode step of the seat begins.
        settings: [seats, 5 + n] float64: temperature, top-k, top-p and min-p as for `draw_triton`, a column c, and
            the random numbers of the tokens drawn at columns c, c + 1, … c + n - 1.
    """

    latest: Tensor
    positions: Tensor
    settings: Tensor


# --- torch ---------------------------------------------------------------------------------------------


def draw_reference(scores: Tensor, settings: Tensor | None = None) -> Tensor:
    """Compute `draw_triton` in torch, row by row and by a sort.

    Arguments and result are the same, but there is no `ranked`. For reading and for tests. Without Triton,
    `common.sampling.draw` samples.
    """
    token_ids = torch.full(scores.shape[:1], NOT_A_TOKEN)
    for row, own in enumerate(scores.cpu()):
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
    kept = len(ids) if top_k == 0 else int(top_k)
    if top_k and math.isfinite(top_p):
        sums = (weights[:kept] * UNITS).long().cumsum(0)
        kept = 1 + int((sums[:-1] < top_p * int(sums[-1])).sum())
    weights = weights[:kept]
    weights = torch.where(weights >= torch.tensor(min_p).float(), weights, 0.0)
    sums = (weights * UNITS).long().cumsum(0)
    total = int(sums[-1])
    return ids[(sums > min(int(uniform * total), total - 1)).byte().argmax()]


# --- Triton --------------------------------------------------------------------------------------------

if HAS_TRITON:
    _UNITS = tl.constexpr(float(UNITS))
    _STEPS, _RANGES = tl.constexpr(STEPS), tl.constexpr(RANGES)
    _FARTHEST = tl.constexpr(0x7F800000)  # the largest key, of an infinite distance
    _NO_ID = tl.constexpr(0x7FFFFFFF)
    _FIELDS = tl.constexpr(FIELDS)
    # Entries of a row's state, all 0 at first.
    _END, _KEPT, _RANGE, _LOW, _BEFORE, _GOAL = (tl.constexpr(i) for i in range(6))

    @triton.jit
    def _keys(row_ptr, columns, mask, best):  # type: ignore[no-untyped-def]  # Triton has no types
        """Load scores and return their keys: the bits of the distance to the best score. Infinite where masked."""
        scores = tl.load(row_ptr + columns, mask=mask, other=float("-inf"))
        return tl.where(scores == best, 0.0, best - scores).to(tl.int32, bitcast=True)

    @triton.jit
    def _weights(keys, temperature, floor):  # type: ignore[no-untyped-def]  # Triton has no types
        """Return the weights of tokens by their keys, as integers: UNITS for the best token, 0 below `floor`."""
        below = -keys.to(tl.float32, bitcast=True)
        # Not `/`, which makes NaN of infinity and a huge temperature. Both operands must have one shape.
        weights = tl.exp(tl.math.div_rn(below, tl.where(below > float("-inf"), temperature, 1.0)))
        return tl.where(weights >= floor, weights * _UNITS, 0.0).to(tl.int64)

    @triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
    def _best_of(tops_ptr, row, parts, most_parts: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton has no types
        """Return a row's best score, and whether it has a token: no NaN, and something above minus infinity."""
        lanes = tl.arange(0, most_parts)
        tops = tl.load(tops_ptr + row * parts + lanes, mask=lanes < parts, other=float("-inf"))
        best = tl.max(tl.where(tops == tops, tops, float("-inf")), axis=0)
        return best, (tl.max((tops != tops).to(tl.int32), axis=0) == 0) & (best > float("-inf"))

    @triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
    def _best_kernel(  # type: ignore[no-untyped-def]  # Triton has no types
        scores_ptr, tops_ptr, ids_ptr, row_stride, vocab, part: tl.constexpr, early: tl.constexpr
    ):
        """Program (i, p) finds the best score in part p of row i, NaN if any score is, and its first token."""
        wait_for_inputs(early)
        row = tl.program_id(0).to(tl.int64)  # 64-bit: row * stride passes 2^31
        columns = tl.program_id(1) * part + tl.arange(0, part)
        scores = tl.load(scores_ptr + row * row_stride + columns, mask=columns < vocab, other=float("-inf"))
        broken = tl.max((scores != scores).to(tl.int32), axis=0)
        top = tl.max(tl.where(scores == scores, scores, float("-inf")), axis=0)
        place = row * tl.num_programs(1) + tl.program_id(1)
        tl.store(tops_ptr + place, tl.where(broken > 0, float("nan"), top))
        tl.store(ids_ptr + place, tl.min(tl.where(scores == top, columns, _NO_ID), axis=0))

    @triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
    def _uniform_of(settings, columns_ptr, row, by_seat: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton has no types
        """Return a row's random number; with `by_seat`, the one of the seat's settings for the row's column."""
        if by_seat:
            first = tl.load(settings + 4).to(tl.int64)
            uniform = tl.load(settings + 5 + tl.load(columns_ptr + row) - first)
        else:
            uniform = tl.load(settings + 4)
        return uniform

    @triton.jit
    def _range_of(keys):  # type: ignore[no-untyped-def]  # Triton has no types
        """Return the range of each key in a search's first step: 1/64 wide in distance, the last unbounded."""
        return tl.minimum(keys.to(tl.float32, bitcast=True) * 64.0, _RANGES - 1.0).to(tl.int32)

    @triton.jit
    def _place(keys, level, first_range, low):  # type: ignore[no-untyped-def]  # Triton has no types
        """Return the ranges of keys in a step of a search, and whether keys are in any of them.

        `first_range` was found by the first step. The bits of `low` that earlier steps have found are those of the
        key; the other bits are 0.
        """
        shift = tl.maximum(31 - 9 * level, 0)
        found = tl.minimum(40 - 9 * level, 31)  # `low` has the bits from here on
        own = _range_of(keys)
        inside = (level == 0) | ((own == first_range) & ((keys ^ low) >> found == 0))
        return tl.where(level == 0, own, (keys - low) >> shift), inside

    @triton.jit(do_not_specialize=["rows", "step"])  # type: ignore[untyped-decorator]  # Triton has no types
    def _search_kernel(  # type: ignore[no-untyped-def]  # Triton has no types
        scores_ptr,
        settings_ptr,
        seats_ptr,
        columns_ptr,
        tops_ptr,
        states_ptr,
        sums_ptr,
        row_stride,
        settings_stride,
        vocab,
        rows,
        step,
        by_seat: tl.constexpr,
        part: tl.constexpr,
        most_parts: tl.constexpr,
        early: tl.constexpr,
    ):
        """Take a step of a row's searches. Program (i, p) adds part p of row i to the sums of this step.

        The last program of a row to do so updates the row's state. A search looks for the first token at which the
        running sum, in order of rank, exceeds `goal`. It has found the range `first_range` and the upper bits of
        the key, `low`. The tokens with smaller keys add up to `before`. Searches before it have kept the tokens
        with keys below `end`, and of those with the key `end` the first `kept`.
        """
        wait_for_inputs(early)
        row, part_id, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
        settings = settings_ptr + (tl.load(seats_ptr + row) if by_seat else row) * settings_stride
        temperature, top_k = tl.load(settings).to(tl.float32), tl.load(settings + 1)
        top_p, min_p = tl.load(settings + 2), tl.load(settings + 3).to(tl.float32)
        search, level = step // _STEPS, step % _STEPS
        needed = (search == 2) | ((search == 1) & (top_p <= 1.0)) | ((search == 0) & (top_k < vocab))
        if (temperature > 0.0) & (top_k > 0.0) & needed:
            state_ptr = states_ptr + row * _FIELDS
            best, valid = _best_of(tops_ptr, row, parts, most_parts)
            end, kept = tl.load(state_ptr + _END).to(tl.int32), tl.load(state_ptr + _KEPT)
            end = tl.where(kept == 0, _FARTHEST + 1, end)  # no search before this one: all tokens are kept
            first_range = tl.load(state_ptr + _RANGE).to(tl.int32)
            low = tl.load(state_ptr + _LOW).to(tl.int32)
            floor = tl.where(search == 2, min_p, 0.0)
            sums_ptr += (step * rows + row) * (_RANGES + 1)

            columns = part_id * part + tl.arange(0, part)
            keys = _keys(scores_ptr + row * row_stride, columns, columns < vocab, best)
            place, inside = _place(keys, level, first_range, low)
            inside &= (columns < vocab) & (keys < end) & valid
            if tl.max(inside.to(tl.int32), axis=0) > 0:
                values = tl.where(search == 0, 1, _weights(keys, temperature, floor))
                values = tl.where(inside, values, 0)
                # Additions to one number wait for each other, and most tokens may be in the last range.
                if level == 0:
                    is_last = place == _RANGES - 1
                    tl.atomic_add(
                        sums_ptr + _RANGES - 1, tl.sum(tl.where(is_last, values, 0), axis=0), sem="relaxed"
                    )
                    values = tl.where(is_last, 0, values)
                tl.atomic_add(sums_ptr + place, values, mask=values > 0, sem="relaxed")

            tl.debug_barrier()  # all additions of this program come before the next one
            if tl.atomic_add(sums_ptr + _RANGES, 1) == parts - 1:
                ranges = tl.arange(0, _RANGES)
                sums = tl.load(sums_ptr + ranges, cache_modifier=".cg")
                before, goal = tl.load(state_ptr + _BEFORE), tl.load(state_ptr + _GOAL)
                # The kept tokens with the key `end`:
                place_of_end, has_end = _place(tl.minimum(end, _FARTHEST), level, first_range, low)
                unit = tl.where(search == 0, 1, _weights(tl.minimum(end, _FARTHEST), temperature, floor))
                sums += tl.where(has_end & (ranges == place_of_end), kept * unit, 0)
                if level == 0:
                    total = tl.sum(sums, axis=0)
                    if search == 0:
                        goal = top_k.to(tl.int64) - 1
                    elif search == 1:
                        goal = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64) - 1
                    else:
                        uniform = _uniform_of(settings, columns_ptr, row, by_seat)
                        goal = (uniform * total.to(tl.float64)).to(tl.int64)
                    goal = tl.maximum(tl.minimum(goal, total - 1), 0)
                passed = before + tl.cumsum(sums, 0) > goal
                chosen = tl.min(tl.where(passed, ranges, _RANGES - 1), axis=0)
                before += tl.sum(tl.where(ranges < chosen, sums, 0), axis=0)
                if level == 0:
                    first_range = chosen
                else:
                    low += chosen << tl.maximum(31 - 9 * level, 0)
                if level == _STEPS - 1:
                    unit = tl.where(search == 0, 1, _weights(low, temperature, floor))
                    end, kept = low, (goal - before) // tl.maximum(unit, 1) + 1
                    low, before = low * 0, before * 0
                tl.store(state_ptr + _END, end.to(tl.int64))
                tl.store(state_ptr + _KEPT, kept)
                tl.store(state_ptr + _RANGE, first_range.to(tl.int64))
                tl.store(state_ptr + _LOW, low.to(tl.int64))
                tl.store(state_ptr + _BEFORE, before)
                tl.store(state_ptr + _GOAL, goal)

    @triton.jit
    def _counted(  # type: ignore[no-untyped-def]  # Triton has no types
        row_ptr, columns, vocab, best, ranked, key, temperature, floor
    ):
        """Return what tokens add to the running sum in which the drawn token is found: their weights; for a ranked
        row 1 if a token has the drawn key, else 0."""
        keys = _keys(row_ptr, columns, columns < vocab, best)
        equal = (columns < vocab) & (keys == key)
        return tl.where(ranked, equal.to(tl.int64), _weights(keys, temperature, floor))

    @triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
    def _count_kernel(  # type: ignore[no-untyped-def]  # Triton has no types
        scores_ptr,
        settings_ptr,
        seats_ptr,
        tops_ptr,
        state_ptr,
        sums_ptr,
        row_stride,
        settings_stride,
        vocab,
        by_seat: tl.constexpr,
        searched: tl.constexpr,
        part: tl.constexpr,
        most_parts: tl.constexpr,
        early: tl.constexpr,
    ):
        """Program (i, p) writes the sum of `_counted` over part p of row i."""
        wait_for_inputs(early)
        row, part_id, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
        settings = settings_ptr + (tl.load(seats_ptr + row) if by_seat else row) * settings_stride
        temperature = tl.load(settings).to(tl.float32)
        if temperature > 0.0:
            ranked = tl.load(settings + 1) > 0.0
            floor = tl.load(settings + 3).to(tl.float32)
            best, _ = _best_of(tops_ptr, row, parts, most_parts)
            key = tl.load(state_ptr + row * _FIELDS + _END).to(tl.int32) if searched else 0
            columns = part_id * part + tl.arange(0, part)
            row_ptr = scores_ptr + row * row_stride
            counted = _counted(row_ptr, columns, vocab, best, ranked, key, temperature, floor)
            tl.store(sums_ptr + row * parts + part_id, tl.sum(counted, axis=0))

    @triton.jit(do_not_specialize=["parts"])  # type: ignore[untyped-decorator]  # Triton has no types
    def _pick_kernel(  # type: ignore[no-untyped-def]  # Triton has no types
        scores_ptr,
        settings_ptr,
        seats_ptr,
        columns_ptr,
        tops_ptr,
        ids_ptr,
        state_ptr,
        sums_ptr,
        latest_ptr,
        positions_ptr,
        out_ptr,
        row_stride,
        settings_stride,
        vocab,
        parts,
        has_settings: tl.constexpr,
        by_seat: tl.constexpr,
        searched: tl.constexpr,
        part: tl.constexpr,
        most_parts: tl.constexpr,
        early: tl.constexpr,
    ):
        """Program i writes the token of row i. With `by_seat`, it also moves the row's seat on by a token."""
        wait_for_inputs(early)
        row = tl.program_id(0).to(tl.int64)
        lanes = tl.arange(0, most_parts)
        is_part = lanes < parts
        best, valid = _best_of(tops_ptr, row, parts, most_parts)
        tops = tl.load(tops_ptr + row * parts + lanes, mask=is_part, other=float("-inf"))
        ids = tl.load(ids_ptr + row * parts + lanes, mask=is_part & (tops == best), other=_NO_ID)
        token = tl.min(ids, axis=0)
        if has_settings:
            settings = settings_ptr + (tl.load(seats_ptr + row) if by_seat else row) * settings_stride
            temperature = tl.load(settings).to(tl.float32)
            if valid & (temperature > 0.0):
                ranked = tl.load(settings + 1) > 0.0
                floor = tl.load(settings + 3).to(tl.float32)
                uniform = _uniform_of(settings, columns_ptr, row, by_seat)
                sums = tl.load(sums_ptr + row * parts + lanes, mask=is_part, other=0)
                total = tl.sum(sums, axis=0)
                key = tl.load(state_ptr + row * _FIELDS + _END).to(tl.int32) if searched else 0
                goal = (uniform * total.to(tl.float64)).to(tl.int64)
                if searched:
                    goal = tl.where(ranked, tl.load(state_ptr + row * _FIELDS + _KEPT) - 1, goal)
                goal = tl.minimum(goal, total - 1)
                ends = tl.cumsum(sums, 0)
                chosen = tl.min(tl.where(ends > goal, lanes, most_parts - 1), axis=0)
                before = tl.sum(tl.where(lanes < chosen, sums, 0), axis=0)
                columns = chosen * part + tl.arange(0, part)
                row_ptr = scores_ptr + row * row_stride
                counted = _counted(row_ptr, columns, vocab, best, ranked, key, temperature, floor)
                passed = before + tl.cumsum(counted, 0) > goal
                token = tl.min(tl.where(passed, columns, _NO_ID), axis=0)
        tl.store(out_ptr + row, tl.where(valid, token, -1).to(tl.int64))
        if by_seat:
            # Rows that only fill a captured graph have the seat of another row, and write the same values.
            seat = tl.load(seats_ptr + row)
            tl.store(latest_ptr + seat, tl.where(valid, token, 0).to(tl.int64))
            tl.store(positions_ptr + seat, tl.load(columns_ptr + row) + 1)


def part_of(vocab: int) -> int:
    """Return the number of a row's scores that one program looks at: a power of two, at least 16."""
    return min(MOST_COLUMNS, max(16, 1 << (vocab - 1).bit_length()))


def draw_triton(scores: Tensor, settings: Tensor | None = None, *, ranked: bool = True) -> Tensor:
    """Draw a token from each row. The number of launches depends on `ranked` and on whether there are settings.

    Nothing here waits for the device.

    Args:
        scores: [S, vocab] float32, after biases, penalties and masks. The best may be infinite, and others minus
            infinity. At most a million columns.
        settings: [S, 5] float64, for each row: temperature, top-k, top-p, min-p, and the random number (at
            least 0, below 1) that decides. A temperature of 0 takes the best token, the first among equals.
            With top-k 0, weights are summed by token id, and top-p is not read. Otherwise top-k is in 1 to
            vocab, and weights are summed by rank, the best first. A top-p above 1 filters nothing. None: all
            rows take the best token.
        ranked: whether any row may have a top-k above 0.

    Returns:
        [S] int64, `NOT_A_TOKEN` for a row that has a NaN, or nothing above minus infinity.
    """
    return _launch(scores, None if settings is None else settings.contiguous(), None, None, ranked)


def draw_at_seats_triton(
    scores: Tensor, state: SeatState, seats: Tensor, columns: Tensor, *, ranked: bool = True
) -> Tensor:
    """Draw a token for each row of a decode step, and update the state of the rows' seats.

    Args:
        scores: as for `draw_triton`.
        state: the drawn tokens are written to `latest` (0 for a row without a token), and `columns` + 1 to
            `positions`.
        seats: [S] int64, the seat of each row.
        columns: [S] int64, the column of each row's token. Not `state.positions` itself, which the last launch
            writes.
        ranked: whether any of the seats may have a top-k above 0.

    Returns:
        [S] int64, as from `draw_triton`.
    """
    return _launch(scores, state.settings, state, (seats, columns), ranked)


def _launch(
    scores: Tensor,
    settings: Tensor | None,
    state: SeatState | None,
    rows: tuple[Tensor, Tensor] | None,
    ranked: bool,
) -> Tensor:
    count, vocab = scores.shape
    out = torch.empty(count, dtype=torch.int64, device=scores.device)
    if count == 0:
        return out  # nothing to launch
    seats, columns = rows or (None, None)
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    settings_stride = 0 if settings is None else settings.stride(0)
    part = part_of(vocab)
    parts = triton.cdiv(vocab, part)
    early = early_launch(scores.device)
    sizes = {"part": part, "most_parts": triton.next_power_of_2(parts), **early}
    searched = settings is not None and ranked
    tops = torch.empty(count, parts, dtype=torch.float32, device=scores.device)
    ids = torch.empty(count, parts, dtype=torch.int32, device=scores.device)
    sums = torch.empty(count, parts, dtype=torch.int64, device=scores.device)
    states: Tensor | None = None
    with device_guard(scores):
        _best_kernel[(count, parts)](scores, tops, ids, scores.stride(0), vocab, part=part, **early)
        if searched:
            steps = SEARCHES * STEPS
            # Of each step: a row's sums, and how many programs have added to them.
            zeros = torch.zeros(count, FIELDS + steps * (RANGES + 1), dtype=torch.int64, device=scores.device)
            states, range_sums = zeros.view(-1)[: FIELDS * count], zeros.view(-1)[FIELDS * count :]
            for step in range(steps):
                _search_kernel[(count, parts)](
                    scores,
                    settings,
                    seats,
                    columns,
                    tops,
                    states,
                    range_sums,
                    scores.stride(0),
                    settings_stride,
                    vocab,
                    count,
                    step,
                    by_seat=state is not None,
                    num_warps=8,
                    **sizes,
                )
        if settings is not None:
            _count_kernel[(count, parts)](
                scores,
                settings,
                seats,
                tops,
                states,
                sums,
                scores.stride(0),
                settings_stride,
                vocab,
                by_seat=state is not None,
                searched=searched,
                num_warps=8,
                **sizes,
            )
        _pick_kernel[(count,)](
            scores,
            settings,
            seats,
            columns,
            tops,
            ids,
            states,
            sums,
            None if state is None else state.latest,
            None if state is None else state.positions,
            out,
            scores.stride(0),
            settings_stride,
            vocab,
            parts,
            has_settings=settings is not None,
            by_seat=state is not None,
            searched=searched,
            num_warps=8,
            **sizes,
        )
    return out
