"""Work handed in is done in order, and what is waited for is that work and its own error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from common.streams import Stream, TapeStream, ThreadStream, call_apart, open_stream
from kernels import native

STREAMS = [
    ThreadStream,
    pytest.param(
        TapeStream, marks=pytest.mark.skipif(not native.is_loaded(), reason="no native kernels here")
    ),
]


@pytest.fixture(params=STREAMS)
def stream(request: pytest.FixtureRequest) -> Stream:
    made: Stream = request.param()
    return made


def lookup(table: Tensor) -> Callable[[Tensor], tuple[Tensor]]:
    return lambda ids: (torch.nn.functional.embedding(ids, table),)


def test_work_of_any_size_in_order(stream: Stream) -> None:
    kept = torch.zeros(1)

    def add(x: Tensor) -> tuple[Tensor, Tensor]:
        kept.add_(x.sum())
        return kept.clone(), x * 2

    handed_in = [stream.submit("add", add, [torch.ones(n)]) for n in (1, 2, 3)]
    sums, doubles = zip(*(each.wait() for each in reversed(handed_in)), strict=True)
    assert [each.item() for each in sums] == [6, 3, 1]
    assert [len(each) for each in doubles] == [3, 2, 1]


def test_work_behind_work(stream: Stream) -> None:
    for n in (1, 2, 3):  # recorded, then played behind what was recorded, then behind what is played
        first = stream.submit("halve", lambda x: (x / 2, -x), [torch.full((n,), 8.0)], fetch=False)
        second = stream.submit("sum", lambda a, b, c: (a + b + c,), [torch.ones(n)], first)
        assert second.wait()[0].tolist() == [4 - 8 + 1] * n


def test_an_error_belongs_to_its_work_and_to_what_builds_on_it(stream: Stream) -> None:
    table, ids = torch.arange(4.0).view(4, 1), torch.tensor([2])
    assert stream.submit("look up", lookup(table), [ids]).wait()[0].item() == 2
    assert stream.submit("double", lambda x: (x * 2,), [torch.ones(1)]).wait()[0].item() == 2
    bad = stream.submit("look up", lookup(table), [torch.tensor([9])])
    behind = stream.submit("double", lambda x: (x * 2,), [], bad)
    good = stream.submit("look up", lookup(table), [ids])
    with pytest.raises(IndexError, match="out of range"):
        behind.wait()
    assert good.wait()[0].item() == 2
    assert good.wait()[0].item() == 2
    worse = stream.submit("look up", lookup(table), [torch.tensor([-1])])
    with pytest.raises(IndexError, match="out of range"):
        worse.wait()


def test_a_call_comes_after_all_that_was_handed_in(stream: Stream) -> None:
    kept = torch.zeros(1)

    def slowly(x: Tensor) -> tuple[Tensor]:
        for _ in range(300):
            x = x.sin()
        return (kept.add_(1) + x[0],)

    handed_in = [stream.submit("slowly", slowly, [torch.ones(20_000)]) for _ in range(4)]
    assert stream.call(kept.item) == 4
    assert all(each.done() for each in handed_in)
    with pytest.raises(ZeroDivisionError):
        stream.call(lambda: 1 // 0)
    assert stream.aside(lambda: 5) == 5


def test_done_waits_as_long_as_it_is_told(stream: Stream) -> None:
    def slowly(x: Tensor) -> tuple[Tensor]:
        for _ in range(2000):
            x = x.sin()
        return (x,)

    for _ in range(2):  # a recording is done when it is handed in
        pending = stream.submit("slowly", slowly, [torch.ones(20_000)])
    assert not pending.done()
    assert pending.done(60.0)
    assert pending.done()


def test_what_is_called_apart_leaves_no_thread_and_its_error_is_raised_here() -> None:
    assert call_apart(lambda: threading.current_thread().name) == "apart"
    with pytest.raises(KeyError, match="nothing"):
        call_apart(lambda: {}["nothing"])
    assert "apart" not in {thread.name for thread in threading.enumerate()}


def test_the_best_stream_for_a_device() -> None:
    assert isinstance(open_stream(torch.device("cpu"), recorded=False), ThreadStream)
    if native.is_loaded():
        assert isinstance(open_stream(torch.device("cpu"), recorded=True), TapeStream)


@pytest.mark.skipif(not native.is_loaded(), reason="no native kernels here")
def test_a_tape_plays_while_python_is_busy() -> None:
    """The stream is ahead of the host: it has done its work when the host looks up from its own."""
    stream = TapeStream()

    def some(x: Tensor) -> tuple[Tensor]:
        for _ in range(50):
            x = x.sin()
        return (x,)

    stream.submit("some", some, [torch.ones(1000)])
    pending = stream.submit("some", some, [torch.ones(1000)])
    deadline = time.monotonic() + 30.0
    while not pending.done():
        assert time.monotonic() < deadline


@pytest.mark.gpu
def test_a_gpu_copies_what_is_done_while_it_computes_what_follows() -> None:
    stream = open_stream(torch.device("cuda"), recorded=False)
    x = torch.randn(4096, 4096, device="cuda")

    def product(x: Tensor) -> tuple[Tensor, ...]:
        for _ in range(40):
            x = (x @ x).clamp(-1, 1)
        return (x.sum(),)

    stream.submit("warm", product, [x]).wait()
    first, second = (stream.submit("product", product, [x]) for _ in range(2))
    (total,) = first.wait()
    assert total.device.type == "cpu"
    assert not second.done(), "the copy of the first waited for the first alone"
    assert torch.equal(second.wait()[0], total)
    behind = stream.submit(
        "next", lambda y, x: (y + x[0, 0],), [x], stream.submit("p", product, [x], fetch=False)
    )
    assert behind.wait()[0].device.type == "cpu"
