"""When streams did what they were given: on threads, by tapes, and on a GPU that is played by events of our own."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import pytest
import torch

from common import work_times
from common.streams import Stream, TapeStream, ThreadStream
from common.work_times import DeviceTimes, HostTimes
from kernels import native


def test_a_call_that_raises_is_timed_too() -> None:
    times = HostTimes()
    before = time.monotonic()
    assert times.timed("one", lambda: 7)() == 7
    with pytest.raises(ZeroDivisionError):
        times.timed("two", lambda: 1 / 0)()
    done = times.take()
    assert [work.key for work in done] == ["one", "two"]
    assert before <= done[0].began_s <= done[0].ended_s <= done[1].began_s <= time.monotonic()
    assert times.take() == []


@pytest.mark.parametrize("kind", [ThreadStream, TapeStream])
def test_a_stream_tells_what_it_did_while_somebody_wants_to_know(kind: type[Stream]) -> None:
    if kind is TapeStream and not native.is_loaded():
        pytest.skip("no native kernels here")
    stream = kind()

    def double(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x + x,)

    def work(key: str) -> None:
        stream.submit(key, double, [torch.ones(3)]).wait()

    for key in ("a", "b", "a"):  # a tape is recorded when its kind first comes, and that is not told
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
    """An event of a GPU whose clock the test turns, in milliseconds; it is over once the GPU has got so far."""

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


def test_a_gpus_times_are_on_the_hosts_clock_and_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
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
