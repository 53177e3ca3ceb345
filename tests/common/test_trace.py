"""Traces: they keep the format's rules, have every request once, and leave nothing in the engine when they end."""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.engine.engine import Engine
from common.errors import StartupError
from common.observing.trace import TraceBuffer, TraceFile, Tracer
from common.request import Request
from common.startup.phases import phase_names
from tests.support.engines import add, build, greedy, run
from tests.support.traces import Event, assert_valid, read_trace, requests_of
from tests.support.traffic import Traffic, random_traffic

PHASES = phase_names()
TIGHT = {"block_size": 2, "num_blocks": 24}  # some are preempted


def tight(phase: str) -> dict[str, Any]:
    return {PHASES[0]: {"batch_wait_timeout_s": 0.0}, PHASES[1]: {}}.get(phase, TIGHT)


def traced(phase: str, **options: Any) -> tuple[Engine, Tracer, TraceBuffer]:
    engine = build(phase, clock=time.monotonic, **options)
    return engine, Tracer(engine), TraceBuffer()


@contextlib.contextmanager
def recorded(engine: Engine) -> Iterator[list[Event]]:
    """Record a trace of the block. After the block, the yielded list has its events, which must be valid."""
    tracer, buffer = Tracer(engine), TraceBuffer()
    events: list[Event] = []
    tracer.start(buffer)
    yield events
    tracer.stop(buffer)
    events += read_trace(buffer.fetch())
    assert_valid(events)


class TracedTraffic(Traffic):
    """Random traffic that is traced from its first request to its last."""

    def __init__(self, phase: str, **options: Any) -> None:
        super().__init__(phase, **options)
        self.engine.clock = time.monotonic
        self.tracer, self.buffer = Tracer(self.engine), TraceBuffer()
        self.tracer.start(self.buffer)
        self.all: dict[int, Request] = {}

    def step(self, guilty: int | None = None) -> None:
        self.all |= {request.arrival: request for request in self.live.values()}
        super().step(guilty)

    def trace(self) -> list[Event]:
        self.tracer.stop(self.buffer)
        return read_trace(self.buffer.fetch())


@pytest.mark.parametrize("phase", PHASES)
def test_a_trace_has_every_request_once_however_it_ends(phase: str) -> None:
    traffic = TracedTraffic(phase, **tight(phase))
    random_traffic(traffic, 700, seed=3)
    events = traffic.trace()
    assert_valid(events)
    counters = traffic.engine.telemetry.counters
    tracks = requests_of(events)
    assert tracks.keys() == traffic.all.keys()
    assert len(tracks) == counters.requests_added
    for arrival, request in traffic.all.items():
        begin, end = tracks[arrival][0], tracks[arrival][-1]
        assert begin["name"] == end["name"] == request.request_id
        assert end["args"]["reason"] == (request.finish_reason or "error")
        assert end["args"]["new tokens"] == request.num_generated_tokens
        assert ("error" in end["args"]) == (request.error is not None)
        said = [output for output in traffic.told[request.request_id] if output.token_id is not None]
        assert [e["name"] for e in tracks[arrival]].count("first token") == bool(said)
    reasons = {tracks[arrival][-1]["args"]["reason"] for arrival in tracks}
    assert reasons == {"eos", "length", "cancelled", "error"}
    names = Counter(event["name"] for event in events if event["ph"] == "n")
    assert names["preempted"] == counters.preemptions
    assert (counters.preemptions > 0) == (tight(phase) is TIGHT)
    steps = [event for event in events if event["ph"] == "X" and event["name"].startswith("step ")]
    assert [event["args"]["step"] for event in steps] == list(range(counters.steps))
    computed = sum(event["args"]["decode_tokens"] for event in steps)
    assert computed == counters.decode_tokens


@pytest.mark.parametrize("phase", [PHASES[0], PHASES[3], PHASES[5]])
def test_parts_of_a_step_lie_in_it(phase: str) -> None:
    engine = build(phase, clock=time.monotonic)
    with recorded(engine) as events:
        for prompt in ("ab", "cdef"):
            add(engine, prompt, greedy(5))
        run(engine)
    host = [event for event in events if event["ph"] == "X" and event["tid"] == 1]
    inside = [event for event in host if not event["name"].startswith("step ")]
    ahead = phase == PHASES[5]
    assert {e["name"] for e in inside} == (
        {"plan", "launch", "wait", "commit"} if ahead else {"plan", "pass", "sample", "commit"}
    )
    steps = [(e["ts"], e["ts"] + e["dur"]) for e in host if e["name"].startswith("step ")]
    for part in inside:
        assert any(a <= part["ts"] and part["ts"] + part["dur"] <= b + 0.01 for a, b in steps)
    stream = Counter(event["name"] for event in events if event["ph"] == "X" and event["tid"] == 2)
    passes = engine.telemetry.counters.passes
    assert stream == ({"forward": passes, "sample": passes} if ahead else {})
    chunks = [e["name"] for e in events if e["ph"] == "b" and e["name"].startswith("chunk")]
    assert chunks == ["chunk 0:2", "chunk 0:4"]


def test_a_sink_that_takes_no_more_ends_its_trace_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    class Full(TraceBuffer):
        def write(self, data: bytes) -> None:
            if b"step 2" in data:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().write(data)

    engine, tracer, good = traced("phase5_continuous")
    full = Full()
    tracer.start(full)
    tracer.start(good)
    add(engine, "ab", greedy(6))
    with caplog.at_level(logging.WARNING):
        outputs = run(engine)
    assert len(outputs) == 6
    assert [r.message for r in caplog.records] == ["a trace ends early: No space left on device"]
    assert full.closed
    for buffer in (full, good):
        tracer.stop(buffer)
    assert engine.watchers == []
    events = read_trace(full.fetch())
    assert {e["name"] for e in events if e["ph"] == "X"} >= {"step 0", "step 1"}
    whole = read_trace(good.fetch())
    assert_valid(whole)
    assert "step 5" in {e["name"] for e in whole}


def test_a_trace_that_is_not_fetched_has_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TraceBuffer, "MOST_BYTES", 4096)
    engine, tracer, buffer = traced("phase5_continuous")
    tracer.start(buffer)
    add(engine, "ab", greedy(20))
    run(engine)
    assert buffer.closed
    tracer.stop(buffer)
    data = buffer.fetch()
    assert len(data) <= 4096
    assert read_trace(data)


def test_a_file_has_every_step_that_is_over(tmp_path: Path) -> None:
    path = tmp_path / "some.trace"
    path.write_text("what was there before")
    engine, tracer, _ = traced("phase5_continuous")
    file = TraceFile(path)
    tracer.start(file)
    add(engine, "ab", greedy(4))
    for step in range(3):
        engine.step()
        events = read_trace(path.read_bytes())
        assert f"step {step}" in {event["name"] for event in events}
    assert not path.read_bytes().rstrip().endswith(b"]")
    run(engine)
    tracer.stop(file)
    assert path.read_bytes().endswith(b"]\n")
    assert_valid(read_trace(path.read_bytes()))


@pytest.mark.parametrize("name", ["missing/some.trace", "."])
def test_a_file_that_cannot_be_written_is_said_in_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(StartupError, match=r"--trace .*: (No such file|Is a directory)"):
        TraceFile(tmp_path / name)
