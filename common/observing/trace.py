"""Traces: an engine's activity over time as Chrome's trace events, which Perfetto (ui.perfetto.dev) displays.

```text
engine       [ step 7 ................................ ][ step 8 ........ ]       B[egin] and duration in one: X
               [plan][ pass ............ ][sample][commit]  [plan][ pass …
stream       (phase 9)     [ forward ..... ][sample]
request 3    [ request-3 .....................................            ]       nested, b to e
               [ waiting ][ prefill ............ ][ decode …
                            [ chunk 0:256 ]         ^ first token                 a moment: n
KV tokens    used, empty                                                          counters: C
```

A trace is a JSON array of events. Its end may be missing, so the file of a killed server is a valid trace. Times
are in microseconds since the recording began.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from common.engine.requests import Phase
from common.engine.scheduling import PrefillChunk, StepPlan
from common.engine.telemetry import Part, PartTimer, StepRecord
from common.errors import StartupError
from common.request import Request, RequestState, StepOutput

if TYPE_CHECKING:  # it imports torch, which the server's process does without
    from common.engine.engine import Engine

logger = logging.getLogger(__name__)

Event = dict[str, Any]

PROCESS = 1
TRACKS = {"host": 1, "stream": 2}  # the format calls a track a thread


# ---------------------------------------------------------------------- sinks


class TraceFile:
    """A trace in a file. A step's events are written when the step ends, so a crash loses one step's at most.

    Raises:
        StartupError: the file cannot be opened for writing.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise StartupError(f"--trace {path}: {error.strerror}") from None

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def close(self) -> None:
        self._file.close()


class TraceBuffer:
    """Holds events until they are fetched, at most `MOST_BYTES`. If more come, `write` raises OSError.

    Attributes:
        closed: True if no more events will come: the trace is complete, or it ended early because the buffer was
            full.
    """

    MOST_BYTES = 16 * 2**20

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = bytearray()
        self.closed = False

    def write(self, data: bytes) -> None:
        with self._lock:
            if len(self._waiting) + len(data) > self.MOST_BYTES:
                raise OSError("nobody fetches it")
            self._waiting += data

    def close(self) -> None:
        self.closed = True

    def fetch(self) -> bytes:
        """Return the bytes written since the last call. Any thread may call this."""
        with self._lock:
            waiting, self._waiting = self._waiting, bytearray()
        return bytes(waiting)


#: Receives the bytes of a trace. Each call of `write` has whole events, or the end of the JSON array. It raises
#: OSError if no more bytes can be written.
Sink = TraceFile | TraceBuffer


# ---------------------------------------------------------------------- one request

_ADMITTED = {RequestState.PREFILL: "prefill", RequestState.DECODE: "decode"}


class RequestTrack:
    """Makes the trace events of one request, which a viewer draws as one track. Spans of a track are nested: the
    span that began last ends first."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._open: list[str] = []
        self._since = 0.0

    @property
    def stage(self) -> str:
        """The request's stage: `waiting`, `prefill` or `decode`."""
        return self._open[-1]

    def begin(self, now: float, **known: Any) -> list[Event]:
        request = self.request
        known |= {"prompt tokens": request.num_prompt_tokens, "max tokens": request.params.max_new_tokens}
        stage = _ADMITTED.get(request.state, "waiting")
        self._since = now
        return [self._begin(now, _plain(request.request_id), known), self._begin(now, stage)]

    def step(self, began: float, ended: float, chunk: PrefillChunk | None, first_token: bool) -> list[Event]:
        """Return the events of a step for this request.

        Args:
            began: when the step began, in microseconds since the recording began.
            ended: when the step ended, likewise.
            chunk: the request's chunk in the step, if it has one.
            first_token: whether the step returned the request's first token.
        """
        state = self.request.state
        began = max(began, self._since)  # the request may arrive while the step waits for an earlier one
        events: list[Event] = []
        prefills_again = self.stage == "decode" and chunk is not None
        if prefills_again or (self.stage != "waiting" and state is RequestState.WAITING):
            events += [self._end(began), self._moment(began, "preempted"), self._begin(began, "waiting")]
        if self.stage == "waiting" and (chunk is not None or state in _ADMITTED):
            events += [self._end(began), self._begin(began, "prefill")]
        if chunk is not None:
            events += [self._begin(began, f"chunk {chunk.start}:{chunk.end}"), self._end(ended)]
        if self.stage == "prefill" and state is RequestState.DECODE:
            events += [self._end(ended), self._begin(ended, "decode")]
        if first_token:
            events.append(self._moment(ended, "first token"))
        return events + (self.end(ended) if self.request.is_terminal else [])

    def end(self, now: float) -> list[Event]:
        """Return the events that close the track, since the request has ended or the recording ends before it does.

        `now`: in microseconds since the recording began.
        """
        request = self.request
        reason = request.finish_reason or ("error" if request.error else "still running")
        known = {
            "reason": reason,
            "new tokens": request.num_generated_tokens,
            "cached tokens": request.cached_tokens,
            **({"error": _plain(str(request.error))} if request.error else {}),
        }
        events = [self._end(now) for _ in self._open[1:]]
        return [*events, self._end(now, known)]

    def _begin(self, now: float, name: str, known: Event | None = None) -> Event:
        self._open.append(name)
        return self._event("b", now, name, known)

    def _end(self, now: float, known: Event | None = None) -> Event:
        return self._event("e", now, self._open.pop(), known)

    def _moment(self, now: float, name: str) -> Event:
        return self._event("n", now, name)

    def _event(self, kind: str, now: float, name: str, known: Event | None = None) -> Event:
        # By arrival: an id may be used again once its request is done.
        event: Event = {"ph": kind, "cat": "request", "id": self.request.arrival, "name": name, "ts": now}
        return event | ({"args": known} if known else {})


def _plain(text: str) -> str:
    """Make a client's text valid for JSON: a lone surrogate (half of a UTF-16 pair) becomes a `?`."""
    return text.encode("utf-8", "replace").decode("utf-8")


# ---------------------------------------------------------------------- one recording


class Recording:
    """Writes an engine's events to a sink, from `begin` to `end`. Only the tracks of live requests are in memory.

    Attributes:
        ended_early: True if writing to the sink has failed, so that the trace has ended.
    """

    def __init__(self, sink: Sink, phase: Phase) -> None:
        self._sink = sink
        self._phase = phase
        self._zero_s = 0.0
        self._tracks: dict[int, RequestTrack] = {}  # by arrival
        self._before = b"[\n"
        self.ended_early = False

    def begin(self, now_s: float, live: Iterable[Request]) -> None:
        self._zero_s = now_s
        names = [("process_name", 0, self._phase.slug)]
        names += [
            ("thread_name", track, "engine" if lane == "host" else lane) for lane, track in TRACKS.items()
        ]
        events = [{"ph": "M", "tid": tid, "name": kind, "args": {"name": name}} for kind, tid, name in names]
        for request in live:
            events += self._open(request, 0.0, **{"began before": True})
        self._write(events)

    def arrived(self, now_s: float, request: Request) -> None:
        self._write(self._open(request, self._at(now_s)))

    def stepped(
        self, record: StepRecord, plan: StepPlan, outputs: Sequence[StepOutput], parts: Sequence[Part]
    ) -> None:
        ended_s = record.started_s + record.duration_s
        began, ended = self._at(record.started_s), self._at(ended_s)
        known = dataclasses.asdict(record)
        events = [self._span("host", f"step {record.step}", record.started_s, ended_s, known)]
        events += [self._span(*part) for part in parts if part.ended_s >= self._zero_s]
        empty = record.kv_reserved_tokens - record.kv_used_tokens
        for name, values in (
            ("requests", {"active": record.active, "waiting": record.waiting}),
            ("KV tokens", {"used": record.kv_used_tokens, "empty": max(empty, 0)}),
        ):
            events.append({"ph": "C", "name": name, "ts": began, "args": values})
        chunks = {chunk.request.arrival: chunk for chunk in plan.prefill}
        first = {o.request_id for o in outputs if o.token_id is not None and o.completion_tokens == 1}
        for arrival, track in list(self._tracks.items()):
            events += track.step(began, ended, chunks.get(arrival), track.request.request_id in first)
            if track.request.is_terminal:
                del self._tracks[arrival]
        self._write(events)

    def end(self, now_s: float) -> None:
        """End the open tracks, complete the JSON array, and close the sink."""
        now, events = self._at(now_s), []
        for track in self._tracks.values():
            events += track.end(now)
        self._write(events)
        self._sink.write(b"\n]\n")
        self._sink.close()

    def give_up(self) -> None:
        """End the trace early, since writing to the sink has failed."""
        self.ended_early = True
        self._tracks.clear()
        self._sink.close()

    def _open(self, request: Request, now: float, **known: Any) -> list[Event]:
        track = self._tracks[request.arrival] = RequestTrack(request)
        return track.begin(now, **known)

    def _span(
        self, lane: str, what: str, began_s: float, ended_s: float, known: Event | None = None
    ) -> Event:
        began = self._at(began_s)
        event: Event = {"ph": "X", "tid": TRACKS[lane], "name": what, "ts": began}
        event["dur"] = round(self._at(ended_s) - began, 3)
        return event | ({"args": known} if known else {})

    def _at(self, now_s: float) -> float:
        """Return a time as microseconds since the recording began; 0 for times before that."""
        return round(max(now_s - self._zero_s, 0.0) * 1e6, 3)

    def _write(self, events: Iterable[Event]) -> None:
        lines = b",\n".join(orjson.dumps({"pid": PROCESS, **event}) for event in events)
        if lines:
            self._sink.write(self._before + lines)
            self._before = b",\n"


# ---------------------------------------------------------------------- an engine's recordings


class Tracer:
    """Runs recordings of one engine, any number at a time. Watches the engine only while there are recordings.

    Call its methods in the engine's thread, between two steps.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._timer = PartTimer(engine.clock)
        self._recordings: dict[Sink, Recording] = {}

    def start(self, sink: Sink) -> None:
        """Start a recording into a sink. It includes the requests that are live already."""
        engine = self._engine
        if not self._recordings:
            self._time_parts(self._timer)
            engine.arrival_watchers.append(self._arrived)
            engine.watchers.append(self._stepped)
        recording = self._recordings[sink] = Recording(sink, engine.phase)
        self._write_to([recording], lambda one: one.begin(engine.clock(), engine.live_requests))

    def stop(self, sink: Sink) -> None:
        """Complete the recording into a sink, unless it ended early. Does nothing if there is none."""
        recording = self._recordings.pop(sink, None)
        if recording is None:
            return
        now_s = self._engine.clock()
        self._write_to([recording], lambda one: one.end(now_s))
        if not self._recordings:
            self._engine.unwatch(self._stepped)
            self._engine.arrival_watchers.remove(self._arrived)
            self._time_parts(None)

    def _arrived(self, request: Request) -> None:
        now_s = self._engine.clock()
        self._write_to(self._recordings.values(), lambda one: one.arrived(now_s, request))

    def _stepped(self, record: StepRecord, plan: StepPlan, outputs: Sequence[StepOutput]) -> None:
        parts = self._timer.take() + self._parts_of_stream()
        self._write_to(self._recordings.values(), lambda one: one.stepped(record, plan, outputs, parts))

    def _time_parts(self, timer: PartTimer | None) -> None:
        """Time the parts of steps from now on, or stop timing them."""
        self._engine.telemetry.timer = timer
        if self._engine.runner.stream is not None:
            self._engine.runner.stream.time_work(timer is not None)

    def _parts_of_stream(self) -> list[Part]:
        """Return the stream's latest work that has ended (`Stream.take_times`), perhaps of an earlier step."""
        stream = self._engine.runner.stream
        works = [] if stream is None else stream.take_times()
        return [Part("stream", work.name, work.began_s, work.ended_s) for work in works]

    def _write_to(self, recordings: Iterable[Recording], write: Callable[[Recording], None]) -> None:
        """Call `write` for each recording that has not ended early. If its sink fails, the recording ends early and
        the engine goes on."""
        for recording in recordings:
            if recording.ended_early:
                continue
            try:
                write(recording)
            except OSError as error:
                logger.warning("a trace ends early: %s", error.strerror or error)
                recording.give_up()
