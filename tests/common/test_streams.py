"""Streams: they run work in order, raise an error only for the work that failed, and time each work."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from common.devices import work_times
from common.devices.streams import Stream, TapeStream, ThreadStream, open_stream
from common.devices.work_times import DeviceTimes
from kernels import native

STREAMS = [
    ThreadStream,
    pytest.param(
        functools.partial(TapeStream, threads=1),
        id="TapeStream",
        marks=pytest.mark.skipif(not native.is_loaded(), reason="no native kernels here"),
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


def test_an_error_is_raised_for_its_work_and_for_work_built_on_it(stream: Stream) -> None:
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


# ---------------------------------------------------------------------- times of work


def test_a_stream_times_its_work_while_timing_is_on(stream: Stream) -> None:
    def double(x: Tensor) -> tuple[Tensor]:
        return (x + x,)

    def work(key: str) -> None:
        stream.submit(key, double, [torch.ones(3)]).wait()

    for key in ("a", "b", "a"):  # the first call of each key records a tape, and has no time
        work(key)
    stream.time_work(True)
    for key in ("a", "b", "a"):
        work(key)
    done = stream.take_times()
    assert [each.key for each in done] == ["a", "b", "a"]
    moments = [moment for each in done for moment in (each.began_s, each.ended_s)]
    assert moments == sorted(moments)
    assert stream.take_times() == []
    stream.time_work(False)
    work("a")
    stream.time_work(True)
    assert stream.take_times() == []
    work("b")
    assert len(stream.take_times()) == 1


class Event:
    """A GPU's event. The test sets the GPU's clock in milliseconds. An event is done once `reached_ms` is at it."""

    now_ms: ClassVar[float] = 0.0
    reached_ms: ClassVar[float] = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_ms = Event.now_ms

    def synchronize(self) -> None:
        Event.reached_ms = self.at_ms

    def query(self) -> bool:
        return self.at_ms <= Event.reached_ms

    def elapsed_time(self, later: Any) -> float:
        assert self.query()
        assert later.query()
        return float(later.at_ms - self.at_ms)


def test_times_of_a_gpu_are_on_the_hosts_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(work_times.time, "monotonic", lambda: 100.0)
    times = DeviceTimes()
    for key, began_ms, ended_ms in (("forward", 2.0, 5.0), ("sample", 5.0, 5.5), ("forward", 7.0, 9.0)):
        Event.now_ms = began_ms
        with times.around(key):
            Event.now_ms = ended_ms
    assert times.take() == [], "the GPU has not got there"
    Event.reached_ms = 6.0
    first = times.take()
    assert [work.key for work in first] == ["forward", "sample"]
    assert [(work.began_s, work.ended_s) for work in first] == [
        pytest.approx((100.002, 100.005)),
        pytest.approx((100.005, 100.0055)),
    ]
    Event.reached_ms = 9.0
    (last,) = times.take()
    assert (last.began_s, last.ended_s) == pytest.approx((100.007, 100.009))
    with pytest.raises(RuntimeError, match="no launch"), times.around("forward"):
        raise RuntimeError("no launch")
    Event.reached_ms = 50.0
    assert times.take() == []
