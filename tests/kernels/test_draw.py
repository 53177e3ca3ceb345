"""The draw of a token by searches (`kernels.draw`), against a sort of the row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import NOT_A_TOKEN
from kernels.draw import (
    MOST_COLUMNS,
    SeatState,
    draw_at_seats_triton,
    draw_reference,
    draw_triton,
)
from tests.kernels.conftest import require_triton

LAST = math.nextafter(1.0, 0.0)  # the largest random number, which draws the last kept token
ALL = math.inf  # a top-p that filters nothing

#: temperature, top-k, top-p, min-p: unranked rows have top-k 0.
FILTERS: list[tuple[float, float, float, float]] = [
    (0.0, 0, ALL, 0.0),
    (1.0, 0, ALL, 0.0),
    (0.7, 0, ALL, 0.05),
    (1.0, 50, ALL, 0.0),
    (1.0, math.inf, 0.9, 0.0),
    (1.3, 40, 0.8, 0.01),
    (3e38, math.inf, 0.5, 0.0),
    (1e-5, 7, 0.999, 0.0),
]


def rows_of(count: int, vocab: int, *, seed: int = 0, spread: float = 3.0) -> Tensor:
    return spread * torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed))


def settings_of(rows: list[tuple[tuple[float, float, float, float], float]], vocab: int) -> Tensor:
    """Return each row's filters and random number as a tensor. An infinite top-k becomes the vocabulary's size."""
    table = [(t, min(k, vocab), p, low, uniform) for (t, k, p, low), uniform in rows]
    return torch.tensor(table, dtype=torch.float64)


@pytest.mark.parametrize(
    ("vocab", "first"),
    [
        *((1, 0), (31, 1), (MOST_COLUMNS + 1, 2)),
        *(pytest.param(MOST_COLUMNS + 1, first, marks=pytest.mark.slow) for first in (0, 1)),
        *(pytest.param(vocab, 0, marks=pytest.mark.slow) for vocab in (MOST_COLUMNS, 3 * MOST_COLUMNS - 1)),
    ],
)
def test_every_filter_draws_what_a_sort_draws(triton_device: str, vocab: int, first: int) -> None:
    """In the three cases of a row of two parts together, each filter has each random number."""
    rows = [(each, (0.0, 0.37, LAST)[(first + i) % 3]) for i, each in enumerate(FILTERS)]
    table, scores = settings_of(rows, vocab), rows_of(len(rows), vocab)
    drawn = draw_triton(scores.to(triton_device), table.to(triton_device)).cpu()
    assert drawn.tolist() == draw_reference(scores, table).tolist()


#: Scores many of which are equal, so that cuts fall between equal scores.
STEPS = st.lists(
    st.sampled_from([0.0, -0.0, 0.0, 1.0, 1.0, 2.0, 3.5, -4.0, -90.0, 1e30, math.inf, -math.inf, math.nan]),
    min_size=1,
    max_size=40,
)
RANDOM = st.builds(
    lambda vocab, seed, spread: rows_of(1, vocab, seed=seed, spread=spread)[0].tolist(),
    st.integers(1, 40),
    st.integers(0, 10_000),
    st.sampled_from([0.1, 3.0, 30.0]),
)


def filters_with(top_p: float) -> st.SearchStrategy[tuple[float, float, float, float]]:
    return st.tuples(
        st.sampled_from([0.0, 1e-5, 0.3, 1.0, 1.0, 2.5, 1e38, torch.finfo(torch.float32).max]),
        st.sampled_from([0, 1, 2, 3, 7, 20, math.inf, math.inf]),
        st.sampled_from([ALL, top_p, 0.95, 0.75, 0.5, 0.5, 0.25, 0.1, 1e-9, 5e-324]),
        st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0]),
    )


Row = tuple[list[float], tuple[float, float, float, float]]
any_row = given(
    # With 0.999999 and random scores, the cut is often within the rounding of two exponentials.
    row=st.tuples(STEPS, filters_with(0.999999)) | st.tuples(RANDOM, filters_with(0.999)),
    uniform=st.floats(0.0, LAST),
)


@settings(max_examples=5)  # the interpreter is slow
@any_row
@pytest.mark.slow
def test_the_kept_tokens_are_those_of_a_sort(row: Row, uniform: float) -> None:
    assert_kept(row, uniform)


def assert_kept(row: Row, uniform: float) -> None:
    """The smallest number draws the first kept token, the largest the last one. These two tokens identify the kept
    set: it is a prefix of the ranks, or all tokens above a floor."""
    require_triton("cpu")
    scores, filters = row
    table = settings_of([(filters, each) for each in (0.0, uniform, LAST)], len(scores))
    rows = torch.tensor([scores] * 3)
    assert draw_triton(rows, table).tolist() == draw_reference(rows, table).tolist()


def test_a_cut_between_equal_scores_keeps_the_first_of_them(triton_device: str) -> None:
    """The largest random number draws the last token that is kept: the last of a stable sort."""
    cuts = [((1.0, 3, ALL, 0.0), 3), ((1.0, math.inf, 0.7, 0.0), 4), ((1.0, 5, 0.55, 0.0), 3)]
    scores = torch.tensor([[0.0, 2.0, 2.0, 2.0, 0.0, 2.0, 2.0, -math.inf]])
    ranks = scores[0].argsort(descending=True, stable=True)
    table = settings_of([(filters, LAST) for filters, _ in cuts], scores.shape[1])
    drawn = draw_triton(scores.expand(len(cuts), -1).contiguous().to(triton_device), table.to(triton_device))
    assert drawn.tolist() == [int(ranks[kept - 1]) for _, kept in cuts]


@pytest.mark.parametrize("given", [True, False])
def test_greedy_rows_take_the_first_of_the_best(triton_device: str, given: bool) -> None:
    scores = rows_of(5, MOST_COLUMNS + 100)
    scores[1, [7, 3, MOST_COLUMNS + 7]] = 100.0
    scores[2, [9, MOST_COLUMNS]] = math.inf
    scores[3, MOST_COLUMNS + 1] = math.nan
    scores[4] = -math.inf
    table: Any = torch.zeros(5, 5, dtype=torch.float64, device=triton_device) if given else None
    drawn = draw_triton(scores.to(triton_device), table).tolist()
    assert drawn == [int(scores[0].argmax()), 3, 9, NOT_A_TOKEN, NOT_A_TOKEN]


def test_rows_of_seats_move_their_seats_on(triton_device: str) -> None:
    """A row uses the parameters of its seat and the random number of its column. A padding row of a graph, here the
    last, repeats another row. Seats without a row do not change."""
    uniforms = torch.rand(9, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    given = settings_of([(FILTERS[i % len(FILTERS)], 0.0) for i in range(9)], 60)
    first = torch.arange(9.0, dtype=torch.float64).unsqueeze(1)  # the column of each seat's first number
    seats, ahead = torch.tensor([4, 0, 7, 5, 4]), torch.tensor([0, 3, 1, 2, 0])
    columns = seats + ahead
    scores = rows_of(5, 60)
    scores[3, 8], scores[4] = math.nan, scores[0]
    latest, positions = torch.arange(9) + 100, torch.arange(9) + 200
    state = SeatState(
        latest.clone().to(triton_device),
        positions.clone().to(triton_device),
        torch.cat([given[:, :4], first, uniforms], dim=1).to(triton_device),
    )
    drawn = draw_at_seats_triton(
        scores.to(triton_device), state, seats.to(triton_device), columns.to(triton_device)
    )
    table = given[seats]
    table[:, 4] = uniforms[seats, ahead]
    assert drawn.tolist() == draw_reference(scores, table).tolist()
    assert drawn[3] == NOT_A_TOKEN
    latest[seats], positions[seats] = drawn.cpu().clamp(min=0), columns + 1
    assert torch.equal(state.latest.cpu(), latest)
    assert torch.equal(state.positions.cpu(), positions)
