"""A pass played from a tape: the same bits for inputs of any size, in order, and without Python."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
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


def test_lists_numbers_and_writes_in_place_are_played() -> None:
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


def test_what_a_tape_cannot_repeat_is_refused() -> None:
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


def test_a_tape_wants_as_many_inputs_as_were_recorded() -> None:
    tape = recorded(torch.add, torch.ones(2), torch.ones(2))
    with pytest.raises(RuntimeError, match="a tape of 2 inputs was given 1"):
        tape(torch.ones(2))


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


def test_passes_come_out_in_order_and_errors_to_whom_they_belong(player: torch.ScriptObject) -> None:
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


def test_a_player_that_goes_away_first_plays_what_it_was_given() -> None:
    written = torch.zeros(1)
    tape = recorded(lambda x: written.add_(x), torch.ones(1))
    written.zero_()
    player = torch.classes.infer.TapePlayer()
    for _ in range(50):
        player.submit(tape.recorded, [torch.ones(1)], 0, 1)
    del player
    assert written.item() == 50


ABANDONED = """
import torch
from kernels import native
from kernels.tape import record
assert native.load_native_kernels()
weights = torch.randn(1500, 1500)
tape, _ = record(lambda x: (x @ weights @ weights @ weights,), torch.randn(1500, 1500))
player = torch.classes.infer.TapePlayer()
player.submit(tape.recorded, [torch.randn(1500, 1500)], 0, 1)
del tape, weights  # the pass that runs holds the last references
del player
print("ended")
"""


def test_a_player_may_go_away_behind_its_tapes() -> None:
    """The thread that joins the player holds the interpreter's lock. Freeing the weights must not wait for it."""
    ended = subprocess.run(
        [sys.executable, "-c", ABANDONED], capture_output=True, text=True, timeout=60.0, check=False
    )
    assert (ended.stdout, ended.returncode) == ("ended\n", 0), ended.stderr


def test_work_goes_on_with_what_earlier_work_returned(player: torch.ScriptObject) -> None:
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


SHARED = """
import psutil, torch
from kernels import native
from kernels.tape import record
assert native.load_native_kernels()
torch.set_num_threads(1)
tape, _ = record(lambda x: (x.exp(),), torch.ones(2**20))
player = torch.classes.infer.TapePlayer()
for threads in (1, 2, 4, 1):
    player.wait(player.submit(tape.recorded, [torch.ones(2**20)], 0, threads))
    print(psutil.Process().num_threads() - before if threads > 1 else "alone", end=" ")
    before = psutil.Process().num_threads()
"""


def test_each_pass_has_its_number_of_threads() -> None:
    """libgomp starts a thread when an operator first needs it, and keeps it if the next one runs alone."""
    ended = subprocess.run(
        [sys.executable, "-c", SHARED], capture_output=True, text=True, timeout=60.0, check=False
    )
    assert ended.stdout == "alone 1 2 alone ", ended.stderr


def test_threads_are_limited_for_the_caller_alone(player: torch.ScriptObject) -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    try:
        assert torch.ops.infer.set_threads_here(before + 3) == before
        assert torch.get_num_threads() == before + 3
        other.start()
        other.join()
    finally:
        assert torch.ops.infer.set_threads_here(before) == before + 3
    assert seen == [before]
