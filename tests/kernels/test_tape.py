"""A pass played from a tape: the same bits for inputs of any size, in order, and without Python."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from common.kv import KVView, Span
from common.models.layers import CausalLM, TokenBatch
from kernels import native
from kernels.tape import CannotRecordError, Tape, record
from phase6_paged.cache import PagedKVCachePool
from tests.support.models import ARCHITECTURES, draw_ids, load, save_tiny, scattered

pytestmark = pytest.mark.skipif(not native.is_loaded(), reason="no native kernels here")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    loaded = load(save_tiny(tmp_path_factory.mktemp("tape"), request.param))
    loaded.pack()
    return loaded


def ready(pool: PagedKVCachePool, pieces: list[tuple[int, list[int]]]) -> tuple[KVView, tuple[Tensor, ...]]:
    """Return the view of a pass over (slot, next tokens), and the tensors that change from pass to pass."""
    spans = []
    for slot, ids in pieces:
        start = pool.get_seq_len(slot)
        spans.append(Span.exact(slot, start, start + len(ids)))
    view = pool.view(spans)
    token_ids = torch.tensor([token_id for _, ids in pieces for token_id in ids])
    host = view.layout.host
    return view, (
        token_ids,
        view.positions,
        torch.arange(len(token_ids)),
        view.layout.rows,
        host.query_offsets,
        host.kv_lengths,
    )


def pass_of(model: CausalLM, view: KVView) -> Callable[..., tuple[Tensor]]:
    def run(token_ids: Tensor, positions: Tensor, logit_rows: Tensor, *_: Tensor) -> tuple[Tensor]:
        return (model(TokenBatch(token_ids, positions, logit_rows), view),)

    return run


def recorded(function: Callable[..., Tensor], *inputs: Tensor) -> Tape:
    """Record the tape of a function with one result."""
    return record(lambda *given: (function(*given),), *inputs)[0]


def test_a_pass_recorded_for_one_token_holds_for_every_other(model: CausalLM) -> None:
    if not native.has_products(model.dtype):
        pytest.skip("no products in this type")
    pool, twin = scattered(model, [40, 40, 40]), scattered(model, [40, 40, 40])
    view, inputs = ready(pool, [(0, [5])])
    tape, outputs = record(pass_of(model, view), *inputs)
    view.advance()
    view, inputs = ready(twin, [(0, [5])])
    assert torch.equal(outputs[0], pass_of(model, view)(*inputs)[0])
    view.advance()
    # decode; a prompt; chunks of prompts beside decode; three sequences that decode
    for pieces in (
        [(0, [7])],
        [(1, draw_ids(20))],
        [(0, [8]), (1, draw_ids(11)), (2, draw_ids(9))],
        [(0, [1]), (1, [2]), (2, [3])],
    ):
        view, inputs = ready(pool, pieces)
        (played,) = tape(*inputs)
        view.advance()
        view, inputs = ready(twin, pieces)
        assert torch.equal(played, pass_of(model, view)(*inputs)[0])
        view.advance()
    for mine, other in zip((*pool.k, *pool.v), (*twin.k, *twin.v), strict=True):
        assert torch.equal(mine, other)


def test_a_tape_plays_lists_of_tensors_and_writes_in_place() -> None:
    weight, kept, few, order = torch.randn(6, 4), torch.zeros(3), torch.ones(2, 1), torch.tensor([4, 0, 2])

    def function(x: Tensor) -> Tensor:
        low, high = (x @ weight).split([1, 3], dim=1)
        kept.add_(high.sum(0))
        return torch.cat([low * 2, high, torch.zeros_like(low) + 1.5, few], dim=1)[:, order]

    tape = recorded(function, torch.ones(2, 6))
    kept.zero_()
    x = torch.randn(2, 6)
    (played,), after = tape(x), kept.clone()
    kept.zero_()
    assert torch.equal(played, function(x))
    assert torch.equal(after, kept)


def test_a_function_that_a_tape_cannot_repeat_is_refused() -> None:
    x, kept = torch.tensor([1.0, 2.0]), torch.ones(2)
    with pytest.raises(CannotRecordError, match="a number was read"):
        recorded(lambda x: x * 2 if x.sum() > 0 else x, x)
    with pytest.raises(CannotRecordError, match="not made by an operator"):
        recorded(lambda _: kept, x)
    assert torch.equal(recorded(lambda x: x + 1, x)(x)[0], x + 1)


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x[:, -1:].contiguous() * 2,
    "reshape": lambda x: x[:, 1:].reshape(-1) * 2,
    "flatten": lambda x: x[:, 1:].flatten() * 2,
    "a choice": lambda x: (x[:, :2] if x[:, :2].is_contiguous() else x[:, 2:]) * 2,
}
SAME_FOR_ANY_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous whole": lambda x: x.contiguous() * 2,
    "reshape of a slice": lambda x: x[:, :2].reshape(-1, 2, 1) * 2,
    "clone": lambda x: x[:, -1:].clone() * 2,
    "reshape of columns": lambda x: x.t().reshape(4, -1) * 2,
}


@pytest.mark.parametrize("name", [*REFUSED, *SAME_FOR_ANY_ROWS])
def test_a_call_that_does_nothing_for_one_row_is_refused(name: str) -> None:
    """It is refused if it would do something for more rows. Otherwise it is recorded."""
    function, rows = (REFUSED | SAME_FOR_ANY_ROWS)[name], 1
    if name in REFUSED:
        rows = 3
        with pytest.raises(CannotRecordError, match="depends on the number of rows"):
            recorded(function, torch.ones(1, 4))
    x = torch.randn(5, 4)
    assert torch.equal(recorded(function, torch.ones(rows, 4))(x)[0], function(x))


# ---------------------------------------------------------------------- the player


@pytest.fixture
def player() -> torch.ScriptObject:
    return torch.classes.infer.TapePlayer()


def slow() -> tuple[Tape, Tensor]:
    """Return a tape that takes some milliseconds, and its input."""

    def function(x: Tensor) -> Tensor:
        for _ in range(300):
            x = x.sin()
        return x

    x = torch.ones(20_000)
    return recorded(function, x), x


def test_passes_end_in_order_and_errors_belong_to_their_pass(player: torch.ScriptObject) -> None:
    lookup = recorded(
        lambda ids: torch.nn.functional.embedding(ids, torch.arange(12.0).view(4, 3)), torch.tensor([0])
    )
    good, bad = torch.tensor([3, 1]), torch.tensor([99])
    tickets = [player.submit(lookup.recorded, [ids], 0, 1) for ids in (good, bad, good)]
    assert player.wait(tickets[2])[0].tolist() == [[9, 10, 11], [3, 4, 5]]
    with pytest.raises(IndexError, match="out of range"):
        player.wait(tickets[1])
    assert player.wait(tickets[0])[0].tolist() == [[9, 10, 11], [3, 4, 5]]
    with pytest.raises(RuntimeError, match="nothing was handed in under 99"):
        player.wait(99)
    with pytest.raises(RuntimeError, match=f"{tickets[0]} was waited for already"):
        player.wait(tickets[0])


def test_a_pass_goes_on_while_python_keeps_its_lock(player: torch.ScriptObject) -> None:
    tape, x = slow()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)  # no other thread gets the lock while this thread runs
    try:
        ticket = player.submit(tape.recorded, [x], 0, 1)
        deadline = time.monotonic() + 30.0
        while not player.is_done(ticket, 0.0):
            assert time.monotonic() < deadline
    finally:
        sys.setswitchinterval(interval)
    assert torch.equal(player.wait(ticket)[0], tape(x)[0])


def test_work_reads_the_results_of_earlier_work(player: torch.ScriptObject) -> None:
    double = record(lambda x: (x * 2, x + 1), torch.ones(1))[0]
    add_up = recorded(lambda a, b, c: a + b * c, *torch.ones(3, 1))
    first = player.submit(double.recorded, [torch.tensor([3.0])], 0, 1)
    second = player.submit(add_up.recorded, [torch.tensor([10.0])], first, 1)
    assert player.wait(second)[0].tolist() == [6 + 4 * 10]
    bad = player.submit(double.recorded, [], 0, 1)
    behind = player.submit(add_up.recorded, [torch.ones(1)], bad, 1)
    with pytest.raises(RuntimeError, match="a tape of 1 inputs was given 0"):
        player.wait(behind)
    with pytest.raises(RuntimeError, match="nothing was handed in under 99"):
        player.submit(double.recorded, [torch.ones(1)], 99, 1)
    assert player.wait(player.submit(double.recorded, [torch.ones(1)], 0, 1))[1].item() == 2.0


@pytest.mark.parametrize("played", [True, False])
def test_a_tape_whose_operator_raises_keeps_no_tensor_of_its_pass(
    played: bool, player: torch.ScriptObject
) -> None:
    table = torch.arange(8.0).view(4, 2)

    def function(x: Tensor, ids: Tensor) -> Tensor:
        return torch.nn.functional.embedding(ids, table) + x

    tape = recorded(function, torch.ones(1, 2), torch.tensor([1]))
    x = torch.ones(1, 2)
    kept = weakref.ref(x)
    inputs = [x, torch.tensor([9])]
    play = (
        (lambda: player.wait(player.submit(tape.recorded, inputs, 0, 1))) if played else lambda: tape(*inputs)
    )
    with pytest.raises(IndexError, match="out of range"):
        play()
    inputs.clear()
    del x
    gc.collect()
    assert kept() is None
    assert tape(torch.ones(1, 2), torch.tensor([3]))[0].tolist() == [[7.0, 8.0]]
