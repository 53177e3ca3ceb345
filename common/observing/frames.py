"""Step traces: frames of an engine's steps, which a viewer can draw.

```text
header  {"format": "infer-steps", "version": 1, "phase": [6, "Paged attention"], "seats": 4, "max_seq_len": 128}

frame   step       its number
        start      when it began, in seconds on the engine's clock; `took`, in seconds
        key        true: a key frame, which has the whole state; discard the state of earlier frames
        memory     [blocks, columns of a block]
        requests   [[request, id, prompt tokens, most new tokens], …]: requests not named since the key frame
        waiting    [number, [request, …]]: the number of waiting requests, and the first of them in order
        running    [[request, seat, columns held, kind, …], …]: requests with a seat, and their work in this step
                     "p", start, end, padding    prefill of these columns, and padding columns
                     "d", number                 decode: one column, and this number of columns of guesses, if any
                     "i"                         an idle row of a request that is done
                     ""                          nothing in this step
        tables     [[request, unchanged entries, block, …], …]: a block table from its first changed entry on
        kept       [[block, …], [block, …]]: unused blocks that the prefix cache now keeps, and keeps no longer
        disk       [blocks, places]: blocks in the file of phase 11, and how many it holds
        found      [[request, tokens], …]: prefix hits of requests whose prefill begins
        verified   [[request, number], …]: number of a request's guesses in the previous frame that were accepted
        preempted  [request, …]: requests that were preempted
        ended      [[request, reason], …]
```

Requests and blocks are numbers. From each key frame on, the first frame with a request's number has its id, too.
A block in several tables is shared. `memory`, `waiting`, `tables`, `kept` and `disk` are written when they change,
`requests`, `found`, `verified`, `preempted` and `ended` when there are any. A request that is not `running` has no
table. A reader may start at any key frame, and needs all frames from there to the frame it shows.

Steps may be left out. A frame has the changes since the previous frame, and the work of its own step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from common.engine.requests import EngineFacts
from common.engine.scheduling import StepPlan
from common.engine.telemetry import StepRecord
from common.request import Request, StepOutput

if TYPE_CHECKING:  # it imports torch, which the server's process does without
    from common.engine.engine import Engine

VERSION = 1
KEY_EVERY = 64  # frames from one key frame to the next: the most that a viewer reads to show any frame
WAITING_NAMED = 24  # waiting requests that a frame names; the others are only counted

Header = dict[str, Any]
Frame = dict[str, Any]


def header(facts: EngineFacts) -> Header:
    """Return the header for all frames of an engine."""
    return {
        "format": "infer-steps",
        "version": VERSION,
        "phase": [facts.phase.number, facts.phase.title],
        "seats": facts.config.max_batch_size,
        "max_seq_len": facts.max_seq_len,
    }


@dataclass(slots=True, eq=False)
class _Known:
    """A request's state, as the frames so far have reported it."""

    request: Request
    number: int
    named_in: int = -1  # step of the latest frame with its id
    ended: bool = False
    slot: int | None = None
    preemptions: int = 0
    table: list[int] = field(default_factory=list)
    guesses: int = 0  # guesses that the step of the latest frame computed
    accepted: int = 0  # guesses that were accepted until the latest frame


class FrameMaker:
    """Makes frames of an engine's steps. Each frame has the changes since the previous frame; a key frame has all.

    Call `note` for every step, and then `frame` if the step is to be shown: in the engine's thread, between two
    steps.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[str, _Known] = {}
        self._running: list[_Known] = []
        self._named = 0
        self._memory = (-1, -1)
        self._waiting: tuple[int, list[int]] = (0, [])
        self._kept: set[int] = set()
        self._disk = (0, 0)
        self._ended: list[StepOutput] = []  # terminal outputs since the latest frame
        self._until_key = 0
        self._key_step = 0  # step of the latest key frame

    def next_is_key(self) -> None:
        """Make the next frame a key frame, for a reader that starts or has missed frames. Any thread may call."""
        self._until_key = 0

    def note(self, outputs: Sequence[StepOutput]) -> None:
        """Note a step's outputs. The next frame reports the requests that they end."""
        self._ended += [output for output in outputs if output.finished]

    def frame(self, record: StepRecord, plan: StepPlan, outputs: Sequence[StepOutput]) -> Frame:
        """Return the frame of the latest step; arguments as for a `StepWatcher`."""
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
        before = self._running
        self._running = [self._know(request, frame) for request in self._engine.scheduler.active]
        self._add_waiting(frame)
        self._add_memory(frame)
        self._add_work(frame, record, plan, outputs)
        self._add_ends(frame, before)
        return frame

    def _forget(self) -> None:
        """Forget what earlier frames have reported, so that a key frame reports the whole state. Requests that are
        live, have a seat or have just ended keep their numbers."""
        self._until_key = KEY_EVERY
        self._memory, self._waiting, self._kept = (-1, -1), (0, []), set()
        self._disk = (0, 0)
        for known in self._known.values():
            known.table = []
        seated = set(self._engine.scheduler.active)
        just_ended = {output.request_id for output in self._ended}
        self._known = {
            name: known
            for name, known in self._known.items()
            if known.request in seated or name in just_ended or not known.request.is_terminal
        }

    def _know(self, request: Request, frame: Frame) -> _Known:
        """Return the record of a request. It is created at the request's first mention.

        Adds the request's number, id and lengths to `frame` if no frame since the latest key frame has them.
        """
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

    # ------------------------------------------------------------------ queue and memory

    def _add_waiting(self, frame: Frame) -> None:
        scheduler = self._engine.scheduler
        first = [scheduler.waiting[i] for i in range(min(WAITING_NAMED, len(scheduler.waiting)))]
        waiting = scheduler.num_waiting, [self._know(request, frame).number for request in first]
        if waiting != self._waiting:
            self._waiting = waiting
            frame["waiting"] = waiting

    def _add_memory(self, frame: Frame) -> None:
        pool = self._engine.runner.pool
        memory = pool.num_blocks, pool.block_size
        if memory != self._memory:
            self._memory = memory
            frame["memory"] = memory
        kept = set(pool.kept_blocks())
        if kept != self._kept:
            frame["kept"] = [sorted(kept - self._kept), sorted(self._kept - kept)]
            self._kept = kept
        if (disk := pool.disk_blocks()) != self._disk:
            frame["disk"] = self._disk = disk
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

    # ------------------------------------------------------------------ work and endings

    def _add_work(
        self, frame: Frame, record: StepRecord, plan: StepPlan, outputs: Sequence[StepOutput]
    ) -> None:
        pool = self._engine.runner.pool
        chunks = {chunk.request: chunk for chunk in plan.prefill}
        decoding = set(plan.decode)
        answered = {output.request_id for output in outputs if output.token_id is not None}
        # If a step pads, it pads all prompts to the longest: see `StepRecord.padded_tokens`.
        longest = max((chunk.end for chunk in plan.prefill), default=0) if record.padded_tokens else 0
        running = frame["running"] = []
        found = []
        for known in self._running:
            request, slot = known.request, known.request.slot
            assert slot is not None
            row: list[Any] = [known.number, pool.seat(slot), pool.get_seq_len(slot)]
            if request in chunks:
                chunk = chunks[request]
                row += ["p", chunk.start, chunk.end, max(0, longest - chunk.end)]
                if chunk.start == request.prefill_start > 0:
                    found.append([known.number, chunk.start])
            elif request in decoding:
                guesses = request.drafts.token_ids
                row.append("i" if request.is_terminal and request.request_id not in answered else "d")
                row += [len(guesses)] * bool(guesses)
            else:
                row.append("")
            running.append(row)
        if found:
            frame["found"] = found

    def _add_ends(self, frame: Frame, before: Sequence[_Known]) -> None:
        """Add preempted and ended requests, and the numbers of accepted guesses, to a frame.

        `before`: the requests that had a seat in the previous frame.
        """
        preempted = [self._know(known.request, frame).number for known in before if _was_preempted(known)]
        if preempted:
            frame["preempted"] = preempted
        verified = []
        for known in before:
            known.slot, known.preemptions = None, known.request.preemptions
            if known.guesses:
                right = min(known.guesses, known.request.drafts.accepted - known.accepted)
                verified.append([self._know(known.request, frame).number, right])
        for known in self._running:
            known.slot, known.preemptions = known.request.slot, known.request.preemptions
        for known in {*before, *self._running}:
            drafts = known.request.drafts
            known.guesses, known.accepted = len(drafts.token_ids), drafts.accepted
        if verified:
            frame["verified"] = verified
        ended = [[self._end(output, frame), output.finish_reason or "error"] for output in self._ended]
        if ended:
            frame["ended"] = ended
        self._ended.clear()

    def _end(self, output: StepOutput, frame: Frame) -> int:
        """Return the number of an ended request. Adds its id to `frame` if no frame since the key frame has it."""
        known = self._known.get(output.request_id)
        if known is not None and not known.ended:
            known.ended = True
            return self._know(known.request, frame).number
        number, self._named = self._named, self._named + 1
        name = [number, output.request_id, output.prompt_tokens, output.completion_tokens]
        frame.setdefault("requests", []).append(name)
        return number


def _was_preempted(known: _Known) -> bool:
    """Return whether a request has been preempted since the previous frame, and has not ended."""
    return known.request.preemptions > known.preemptions and not known.request.is_terminal


def _common(old: list[int], new: list[int]) -> int:
    """Return the length of the common beginning of two block tables."""
    if new[: len(old)] == old:  # usually a table has only grown
        return len(old)
    return next(i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)


class StepTrace:
    """Collects the frames of all steps of an engine from now on, in memory: for short runs.

    Attributes:
        frames: the frame of each step, in order.
    """

    def __init__(self, engine: Engine) -> None:
        self.header = header(engine.maker.facts)
        self.frames: list[Frame] = []
        self._maker = FrameMaker(engine)
        engine.watchers.append(self._watch)

    def _watch(self, record: StepRecord, plan: StepPlan, outputs: Sequence[StepOutput]) -> None:
        self._maker.note(outputs)
        self.frames.append(self._maker.frame(record, plan, outputs))

    def as_json(self) -> dict[str, Any]:
        return {"header": self.header, "frames": self.frames}
