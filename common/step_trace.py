"""Step traces: what each step did, as frames that a viewer can draw.

```text
header  {"format": "infer-steps", "version": 1, "phase": [6, "Paged attention"], "seats": 4, "max_seq_len": 128}

frame   step       its number
        start      when it began, in seconds on the engine's clock; `took`, in seconds
        key        true: forget what earlier frames said, this one says all of it
        memory     [blocks, columns of a block]
        requests   [[request, id, prompt tokens, new tokens at the most], …]: who is named for the first time
        waiting    [how many, [request, …]]: the first of those who wait for a seat, in order
        running    [[request, seat, columns held, kind, …], …]: who holds a seat, and what was computed for it
                     "p", start, end, padding    these columns of its prompt, and columns thrown away
                     "d"                         the column of its latest token, which gives the next one
                     "i"                         a row that is done, and goes along
                     ""                          nothing in this step
        tables     [[request, entries that stay, block, …], …]: a block table, from where it has changed
        kept       [[block, …], [block, …]]: blocks that are kept for requests to come, and that no longer are
        found      [[request, tokens], …]: prompts that begin after what was found in memory
        preempted  [request, …]: who lost its seat and its memory to others
        ended      [[request, reason], …]
```

A request is a number here; its id is told with the first frame that names it. Blocks are numbers, too: one that is
in several tables is shared. `memory`, `waiting`, `tables` and `kept` are told when they change, `requests`,
`found`, `preempted` and `ended` when there are any. Who is not `running` has no table. A reader may start at any
frame with `key`, and needs those after it up to the one that it shows.

Steps may be left out: a frame tells what has changed since the last, and what its own step computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.engine import Engine
from common.request import Request, RequestState, StepOutput
from common.scheduling import PrefillChunk, StepPlan
from common.telemetry import StepRecord

VERSION = 1
KEY_EVERY = 64  # frames; who jumps to a frame reads as many at the most
WAITING_NAMED = 24  # of those who wait; of the others a frame has the number

Header = dict[str, Any]
Frame = dict[str, Any]


def header(engine: Engine) -> Header:
    """What holds for all frames of an engine."""
    return {
        "format": "infer-steps",
        "version": VERSION,
        "phase": [engine.phase.number, engine.phase.title],
        "seats": engine.config.max_batch_size,
        "max_seq_len": engine.max_seq_len,
    }


@dataclass(slots=True, eq=False)
class _Known:
    """What frames have said of a request."""

    request: Request
    number: int
    named_in: int = -1  # step of the frame that named it last
    ended: bool = False
    slot: int | None = None
    table: list[int] = field(default_factory=list)


class FrameMaker:
    """Frames of an engine's steps, each the difference to the one before.

    `note` is told of every step, `frame` asked for those that are to be shown. It asks scheduler and pool what
    anybody may ask, between two steps, in the thread that steps.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[str, _Known] = {}
        self._running: list[_Known] = []
        self._named = 0
        self._memory = (-1, -1)
        self._waiting: tuple[int, list[int]] = (0, [])
        self._kept: set[int] = set()
        self._ended: list[StepOutput] = []  # not told yet
        self._until_key = 0
        self._key_step = 0  # of the latest frame that told everything

    def next_is_key(self) -> None:
        """Let the next frame say all there is: somebody begins to read, or has missed some. Any thread may call
        this."""
        self._until_key = 0

    def note(self, outputs: Sequence[StepOutput]) -> None:
        """What a step gave its requests: those that ended are told with the next frame."""
        self._ended += [output for output in outputs if output.finished]

    def frame(self, record: StepRecord, plan: StepPlan, outputs: Sequence[StepOutput]) -> Frame:
        """What the latest step did, from what its watchers are told of it."""
        frame: Frame = {
            "step": record.step,
            "start": round(record.started_s, 6),
            "took": round(record.duration_s, 6),
        }
        if self._until_key <= 0:
            frame["key"] = True
            self._key_step = record.step
            self._forget()
        self._until_key -= 1
        before, self._running = self._running, self._seated(frame)
        self._tell_waiting(frame)
        self._tell_memory(frame)
        self._tell_work(frame, record, plan, outputs)
        self._tell_ends(frame, before)
        return frame

    def _forget(self) -> None:
        """Begin anew, but for the numbers of requests that are still here."""
        self._until_key = KEY_EVERY
        self._memory, self._waiting, self._kept = (-1, -1), (0, []), set()
        for known in self._known.values():
            known.table = []
        seated = set(self._engine.scheduler.active)
        told_next = {output.request_id for output in self._ended}
        self._known = {
            name: known
            for name, known in self._known.items()
            if known.request in seated or name in told_next or not known.request.is_terminal
        }

    def _know(self, request: Request, frame: Frame) -> _Known:
        """A request's number, told if this frame is the first to name it."""
        known = self._known.get(request.request_id)
        if known is None or known.request is not request:
            known = self._known[request.request_id] = _Known(request, self._named)
            self._named += 1
        if known.named_in < self._key_step:
            known.named_in = frame["step"]
            frame.setdefault("requests", []).append(
                [known.number, request.request_id, request.num_prompt_tokens, request.params.max_new_tokens]
            )
        return known

    # ------------------------------------------------------------------ who and where

    def _seated(self, frame: Frame) -> list[_Known]:
        return [self._know(request, frame) for request in self._engine.scheduler.active]

    def _tell_waiting(self, frame: Frame) -> None:
        scheduler = self._engine.scheduler
        first = [scheduler.waiting[i] for i in range(min(WAITING_NAMED, len(scheduler.waiting)))]
        waiting = scheduler.num_waiting, [self._know(request, frame).number for request in first]
        if waiting != self._waiting:
            self._waiting = waiting
            frame["waiting"] = waiting

    def _tell_memory(self, frame: Frame) -> None:
        pool = self._engine.runner.pool
        memory = pool.num_blocks, pool.block_size
        if memory != self._memory:
            self._memory = memory
            frame["memory"] = memory
        kept = set(pool.kept_blocks())
        if kept != self._kept:
            frame["kept"] = [sorted(kept - self._kept), sorted(self._kept - kept)]
            self._kept = kept
        tables = []
        for known in self._running:
            slot = known.request.slot
            assert slot is not None, f"{known.request.request_id} has a seat and no memory"
            table = list(pool.block_table(slot))
            if slot != known.slot:
                known.table = []
            if table != known.table:
                stays = _common(known.table, table)
                tables.append([known.number, stays, *table[stays:]])
                known.table = table
        if tables:
            frame["tables"] = tables

    # ------------------------------------------------------------------ what was computed

    def _tell_work(
        self, frame: Frame, record: StepRecord, plan: StepPlan, outputs: Sequence[StepOutput]
    ) -> None:
        pool = self._engine.runner.pool
        chunks = {chunk.request: chunk for chunk in plan.prefill}
        decoding = set(plan.decode)
        answered = {output.request_id for output in outputs if output.token_id is not None}
        # Where anything is padded, all prompts are, to the longest: see `StepRecord`.
        longest = max((chunk.end for chunk in plan.prefill), default=0) if record.padded_tokens else 0
        running = frame["running"] = []
        found = []
        for known in self._running:
            request, slot = known.request, known.request.slot
            assert slot is not None
            row: list[Any] = [known.number, pool.seat(slot), pool.get_seq_len(slot)]
            if request in chunks:
                chunk = chunks[request]
                row += _prefill(chunk, longest)
                if chunk.start == request.prefill_start > 0:
                    found.append([known.number, chunk.start])
            elif request in decoding:
                row.append("i" if request.is_terminal and request.request_id not in answered else "d")
            else:
                row.append("")
            running.append(row)
        if found:
            frame["found"] = found

    def _tell_ends(self, frame: Frame, before: Sequence[_Known]) -> None:
        """Who lost its seat, and who is done."""
        preempted = [self._know(known.request, frame).number for known in before if _was_preempted(known)]
        if preempted:
            frame["preempted"] = preempted
        for known in before:
            known.slot = None
        for known in self._running:
            known.slot = known.request.slot
        ended = [[self._end(output, frame), output.finish_reason or "error"] for output in self._ended]
        if ended:
            frame["ended"] = ended
        self._ended.clear()

    def _end(self, output: StepOutput, frame: Frame) -> int:
        """The number of a request that has ended. One that came and went between two frames is named here."""
        known = self._known.get(output.request_id)
        if known is not None and not known.ended:
            known.ended = True
            return self._know(known.request, frame).number
        number, self._named = self._named, self._named + 1
        name = [number, output.request_id, output.prompt_tokens, output.completion_tokens]
        frame.setdefault("requests", []).append(name)
        return number


def _prefill(chunk: PrefillChunk, longest: int) -> list[Any]:
    return ["p", chunk.start, chunk.end, max(0, longest - chunk.end)]


def _was_preempted(known: _Known) -> bool:
    """Whether a request that had a seat waits again, or has found another since."""
    request = known.request
    return request.state is RequestState.WAITING or (not request.is_terminal and request.slot != known.slot)


def _common(old: list[int], new: list[int]) -> int:
    """How many entries both begin with."""
    if new[: len(old)] == old:  # it has grown, as most do
        return len(old)
    return next(i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)


class StepTrace:
    """All steps of an engine, from now on: for runs that are short.

    Attributes:
        frames: of each step, in order.
    """

    def __init__(self, engine: Engine) -> None:
        self.header = header(engine)
        self.frames: list[Frame] = []
        self._maker = FrameMaker(engine)
        engine.watchers.append(self._watch)

    def _watch(self, record: StepRecord, plan: StepPlan, outputs: Sequence[StepOutput]) -> None:
        self._maker.note(outputs)
        self.frames.append(self._maker.frame(record, plan, outputs))

    def as_json(self) -> dict[str, Any]:
        return {"header": self.header, "frames": self.frames}
