"""Applies penalties to the scores of a decode step on a GPU, from counts that stay there.

A penalty depends on how often a sequence has each token, and the step before has just added a token. If the host
kept the counts, it would send the tokens of each sequence and their counts in each step. The number of these tokens
grows, and a captured graph (`common.devices.graphs`) has fixed shapes. So each seat (a place in the batch) has
a count for each token of the vocabulary on the device:

```text
                  vocabulary
latest[seat]              4
counts[seat]      0 2 0 P 0 0 1 0     0: not in the sequence. P: in the prompt only. n: generated n times.
                         +1           the step first counts the latest token,
logits            x x x x x x x x
scores            x x x x x x x x     then changes the scores of all tokens whose count is not 0
                    ^   ^ ^   ^
```

For 128,256 tokens, a seat's counts take half a megabyte, which a GPU reads in 0.1 µs at 4 TB/s.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.dispatch import HAS_TRITON, device_guard
from kernels.draw import part_of
from kernels.overlap import early_launch

if HAS_TRITON:
    import triton
    import triton.language as tl

    from kernels.overlap import wait_for_inputs

#: Added to the count of a token that the repetition penalty finds in the prompt. No token is generated as often.
IN_PROMPT = 2**30

#: Penalties that change nothing: repetition, frequency and presence.
NONE = (1.0, 0.0, 0.0)

#: Sequences whose latest token one program counts.
TILE = 128


class SeatPenalties(NamedTuple):
    """The penalties of the sequence at each seat (a place in the batch), and the tokens they apply to.

    Attributes:
        factors: [seats, 3] float64, repetition, frequency and presence penalty; `NONE` without penalties.
        counts: [seats, vocab] int32, how often the sequence has generated each token. `IN_PROMPT` is added if the
            token is in its prompt and the sequence has a repetition penalty. The latest token is counted by the
            step that reads it. Without penalties, counts are incomplete and change nothing.
    """

    factors: Tensor
    counts: Tensor

    @classmethod
    def none(cls, seats: int, vocab: int, device: torch.device) -> SeatPenalties:
        """Return the state of seats whose sequences have no penalties."""
        factors = torch.zeros(seats, len(NONE), dtype=torch.float64, device=device)
        factors[:, 0] = NONE[0]
        return cls(factors, torch.zeros(seats, vocab, dtype=torch.int32, device=device))


def penalise_reference(logits: Tensor, penalties: SeatPenalties, seats: Tensor, latest: Tensor) -> Tensor:
    """Compute `penalise_triton` in torch, with the same arguments and result. For reading and for tests."""
    own = {seat: row for row, seat in reversed(list(enumerate(seats.tolist())))}  # the first row of each seat
    rows = torch.tensor(list(own.values()), device=seats.device)
    one = torch.ones_like(rows, dtype=torch.int32)
    penalties.counts.index_put_((seats[rows], latest[rows]), one, accumulate=True)
    counts = penalties.counts[seats]
    repetition, frequency, presence = penalties.factors[seats].unsqueeze(2).unbind(1)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition).float()
    generated = counts % IN_PROMPT
    subtracted = torch.where(generated > 0, frequency * generated + presence, 0.0)
    return torch.where(counts > 0, (repeated - subtracted).float(), logits)


if HAS_TRITON:
    _IN_PROMPT = tl.constexpr(IN_PROMPT)

    @triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]  # Triton has no types
    def _count_latest_kernel(  # type: ignore[no-untyped-def]  # Triton has no types
        latest_ptr, seats_ptr, counts_ptr, count, vocab, tile: tl.constexpr, early: tl.constexpr
    ):
        """Program i counts the latest tokens of a tile of rows."""
        wait_for_inputs(early)
        rows = tl.program_id(0) * tile + tl.arange(0, tile)
        seats = tl.load(seats_ptr + rows, mask=rows < count, other=0)
        # Rows that only fill a captured graph have the seat of row 0, whose token is counted once.
        counted = (rows < count) & ((rows == 0) | (seats != tl.load(seats_ptr)))
        places = counts_ptr + seats * vocab + tl.load(latest_ptr + rows, mask=counted, other=0)
        tl.store(places, tl.load(places, mask=counted, other=0) + 1, mask=counted)

    @triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
    def _penalise_kernel(  # type: ignore[no-untyped-def]  # Triton has no types
        logits_ptr,
        seats_ptr,
        factors_ptr,
        counts_ptr,
        penalised_ptr,
        row_stride,
        vocab,
        part: tl.constexpr,
        early: tl.constexpr,
    ):
        """Program (i, p) writes the scores of part p of row i."""
        wait_for_inputs(early)
        row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * part + tl.arange(0, part)
        seat = tl.load(seats_ptr + row)
        repetition = tl.load(factors_ptr + 3 * seat)
        frequency, presence = tl.load(factors_ptr + 3 * seat + 1), tl.load(factors_ptr + 3 * seat + 2)
        inside = columns < vocab
        scores = tl.load(logits_ptr + row * row_stride + columns, mask=inside, other=0.0)
        counts = tl.load(counts_ptr + seat * vocab + columns, mask=inside, other=0)
        generated = counts % _IN_PROMPT
        # In float64, since a penalty may exceed float32.
        exact = scores.to(tl.float64)
        repeated = tl.where(exact > 0.0, exact / repetition, exact * repetition).to(tl.float32).to(tl.float64)
        subtracted = tl.where(generated > 0, frequency * generated.to(tl.float64) + presence, 0.0)
        scores = tl.where(counts > 0, (repeated - subtracted).to(tl.float32), scores)
        tl.store(penalised_ptr + row * vocab + columns, scores, mask=inside)


def penalise_triton(logits: Tensor, penalties: SeatPenalties, seats: Tensor, latest: Tensor) -> Tensor:
    """Count the latest token of each row, then apply the rows' penalties, in two launches.

    `common.sampling.draw` describes the penalties. Nothing here waits for the device.

    Args:
        logits: [S, vocab] float32; not changed.
        penalties: of all seats. `counts` is written: the row of each seat in `seats` gets one token more.
        seats: [S] int64, the seat of each row. Rows with the seat of row 0 repeat row 0, to fill a captured graph.
        latest: [S] int64, the latest token of each row, generated and not counted yet.

    Returns:
        [S, vocab] float32.
    """
    rows, vocab = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    scores = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    part = part_of(vocab)
    early = early_launch(logits.device)
    with device_guard(logits):
        _count_latest_kernel[(triton.cdiv(rows, TILE),)](
            latest, seats, penalties.counts, rows, vocab, tile=TILE, **early
        )
        _penalise_kernel[(rows, triton.cdiv(vocab, part))](
            logits,
            seats,
            *penalties,
            scores,
            logits.stride(0),
            vocab,
            part=part,
            num_warps=8,
            enable_fp_fusion=False,  # rounds products as torch does
            **early,
        )
    return scores
