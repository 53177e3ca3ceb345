"""Penalties that a GPU applies from its own counts, against those that the host counts (`common.sampling.draw`)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.request import Request, SamplingParams
from common.sampling.draw import _adjust
from common.sampling.inputs import SamplingInputs
from kernels.draw import MOST_COLUMNS
from kernels.penalties import IN_PROMPT, TILE, SeatPenalties, penalise_reference, penalise_triton

SEATS = 6


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def penalties_of(vocab: int) -> SeatPenalties:
    """Return random counts. Seat 1 has no penalties, and seat 2 has some that float32 cannot hold."""
    factors = 2 * torch.rand(SEATS, 3, generator=draw(1), dtype=torch.float64) + 0.1
    factors[1:3] = torch.tensor([[1.0, 0.0, 0.0], [1e300, -1e300, 1e39]], dtype=torch.float64)
    counts = torch.randint(-5, 4, (SEATS, vocab), generator=draw(2)).clamp(min=0)
    counts += IN_PROMPT * (torch.rand(SEATS, vocab, generator=draw(3)) < 0.2)
    return SeatPenalties(factors, counts.int())


def logits_of(rows: int, vocab: int) -> Tensor:
    logits = 4 * torch.randn(rows, vocab, generator=draw(4))
    logits[0, 0], logits[-1, -1] = -torch.inf, torch.inf
    return logits


def copied(penalties: SeatPenalties, device: str) -> SeatPenalties:
    return SeatPenalties(*(each.clone().to(device) for each in penalties))


@pytest.mark.parametrize("vocab", [1, 50, MOST_COLUMNS + 5])
def test_scores_and_counts(triton_device: str, vocab: int) -> None:
    """The rows are part of a wider matrix. Seats without a row keep their counts."""
    penalties, seats = penalties_of(vocab), torch.tensor([4, 0, 2, 1])
    latest = torch.tensor([0, vocab - 1, vocab // 2, 0])
    logits = logits_of(4, vocab + 3)[:, :vocab]
    expected, kept = copied(penalties, "cpu"), copied(penalties, triton_device)
    scores = penalise_triton(
        logits.to(triton_device), kept, seats.to(triton_device), latest.to(triton_device)
    )
    assert torch.equal(scores.cpu(), penalise_reference(logits, expected, seats, latest))
    assert torch.equal(kept.counts.cpu(), expected.counts)
    assert torch.equal(scores[3].cpu(), logits[3])  # no penalties
    changed = penalties.counts.clone()
    changed[seats, latest] += 1
    assert torch.equal(kept.counts.cpu(), changed)


@pytest.mark.parametrize("rows", [2, TILE + 2])
def test_rows_that_fill_a_graph_count_nothing(triton_device: str, rows: int) -> None:
    """They repeat row 0, and get its scores: the draw writes both rows' tokens to the same seat."""
    penalties = copied(penalties_of(40), triton_device)
    before = penalties.counts.clone()
    logits = logits_of(1, 40).to(triton_device)
    seats, latest = (torch.full((rows,), value, device=triton_device) for value in (3, 7))
    scores = penalise_triton(logits.expand(rows, -1), penalties, seats, latest)
    assert torch.equal(scores, scores[:1].expand(rows, -1))
    before[3, 7] += 1
    assert torch.equal(penalties.counts, before)


@pytest.mark.parametrize(
    "values",
    [
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.4, "presence_penalty": -0.7},
        {"repetition_penalty": 0.6, "frequency_penalty": -1.5, "presence_penalty": 2.0},
    ],
    ids=str,
)
def test_the_scores_are_those_of_counts_on_the_host(triton_device: str, values: dict[str, float]) -> None:
    """Bit for bit, while a sequence generates tokens."""
    request = Request("a", [3, 3, 5, 8], SamplingParams(max_new_tokens=9, **values))
    penalties = SeatPenalties.none(1, 12, torch.device(triton_device))
    penalties.factors[0] = torch.tensor(request.params.penalties, dtype=torch.float64)
    if "repetition_penalty" in values:
        penalties.counts[0, [3, 5, 8]] = IN_PROMPT
    seat = torch.tensor([0], device=triton_device)
    for step, token in enumerate([5, 1, 1, 11, 5]):
        request.token_ids.append(token)
        logits = logits_of(1, 12).roll(step, 1).nan_to_num(posinf=9.0)
        latest = torch.tensor([token], device=triton_device)
        scores = penalise_triton(logits.to(triton_device), penalties, seat, latest)
        inputs = SamplingInputs.of([request], None, 12, torch.device("cpu"))
        assert torch.equal(scores.cpu(), _adjust(logits, inputs))
