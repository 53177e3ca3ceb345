"""The order of work on a GPU's streams, with stand-ins: a copy waits for its own work only, a look for none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from common.devices.streams import CudaStream
from common.request import SamplingParams
from tests.support.engines import add, assert_all_free, assert_answered, build, run, tiny_model
from tests.support.streams import runner_of


class Trace:
    """Records calls of stand-ins for CUDA's streams and events. On a stream, all work after a wait waits, too.

    Attributes:
        current: the streams that are entered, the innermost last.
        submitted: number of submissions to the compute stream.
        waits: for each stream, the numbers of the submissions that it waits for, in order.
    """

    def __init__(self) -> None:
        self.current: list[FakeStream] = []
        self.submitted = 0
        self.waits: dict[FakeStream, list[int]] = {}

    @contextlib.contextmanager
    def stream(self, entered: FakeStream) -> Iterator[None]:
        self.current.append(entered)
        yield
        self.current.pop()


class FakeStream:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        trace.waits[self] = []

    def wait_stream(self, other: Any) -> None:
        pass

    def wait_event(self, event: FakeEvent) -> None:
        self._trace.waits[self].append(event.work)

    def synchronize(self) -> None:
        pass


class FakeEvent:
    """Marks the end of the latest submission."""

    def __init__(self, trace: Trace) -> None:
        self._trace, self.work = trace, 0

    def record(self) -> None:
        self.work = self._trace.submitted

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Trace:
    trace = Trace()
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: FakeStream(trace))
    monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent(trace))
    monkeypatch.setattr(torch.cuda, "stream", trace.stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda *_: None)
    monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)
    return trace


def test_a_copy_and_an_aside_wait_for_their_own_work_only(
    trace: Trace, monkeypatch: pytest.MonkeyPatch, torch_kernels: None
) -> None:
    model = tiny_model()
    options = {"block_size": 4, "prefill_chunk_size": 16, "max_batch_size": 6, "captured_steps": False}
    engine = build("phase9_pipelined", model, **options)
    stream = CudaStream(torch.device("cpu"), ())
    monkeypatch.setattr(runner_of(engine), "stream", stream)
    submit, aside = stream.submit, stream.aside
    fetched: list[int] = []
    looked: list[FakeStream] = []

    def submitted(*arguments: Any, fetch: bool = True, **options: Any) -> Any:
        trace.submitted += 1
        if fetch:
            fetched.append(trace.submitted)
        return submit(*arguments, fetch=fetch, **options)

    def look(function: Any) -> Any:
        def looking() -> Any:
            looked.append(trace.current[-1])
            return function()

        return aside(looking)

    monkeypatch.setattr(stream, "submit", submitted)
    monkeypatch.setattr(stream, "aside", look)
    requests = [
        add(
            engine, [3 + i] * (10 + i), SamplingParams(temperature=0.0, max_new_tokens=4 + i, ignore_eos=True)
        )
        for i in range(10)
    ]
    assert_answered(run(engine), requests, model)
    assert_all_free(engine)
    compute, copies, looks = trace.waits
    assert (
        trace.waits[copies] == fetched
    )  # each copy waits for the work that it copies, and for none after it
    assert set(looked) == {looks}
    assert len(looked) > 10
    assert trace.waits[looks] == trace.waits[compute] == []
