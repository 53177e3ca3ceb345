"""Step traces: from any key frame on, the frames give the state of the engine in every step."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from common.engine.engine import Engine
from common.engine.scheduling import StepPlan
from common.engine.telemetry import StepRecord
from common.observing.frames import KEY_EVERY, WAITING_NAMED, FrameMaker, StepTrace
from common.request import StepOutput
from tests.support.engines import add, build, greedy

PHASES = ["static", "continuous", "paged", "chunked", "prefix", "pipelined"]
TIGHT: dict[str, Any] = {"block_size": 4, "num_blocks": 22, "max_seq_len": 48}
SLOTS: dict[str, Any] = {"max_seq_len": 48}


class Reader:
    """Rebuilds the engine's state from frames, as a viewer does."""

    def __init__(self) -> None:
        self.ids: dict[int, str] = {}
        self.tables: dict[int, list[int]] = {}
        self.kept: set[int] = set()
        self.waiting: tuple[int, list[int]] = (0, [])
        self.memory: list[int] = []
        self.running: list[Any] = []
        self.disk = [0, 0]

    def read(self, frame: dict[str, Any]) -> None:
        if frame.get("key"):
            self.__init__()  # type: ignore[misc]  # forgets everything
        self.ids |= {number: name for number, name, *_ in frame.get("requests", ())}
        self.running = frame["running"]
        told = [each[0] for each in frame.get("ended", ())] + frame.get("preempted", [])
        assert self.ids.keys() >= set(told), "who is spoken of is named"
        self.memory = frame.get("memory", self.memory)
        self.waiting = frame.get("waiting", self.waiting)
        self.disk = frame.get("disk", self.disk)
        for number, stays, *blocks in frame.get("tables", ()):
            self.tables[number] = [*self.tables.get(number, ())[:stays], *blocks]
        self.tables = {row[0]: self.tables[row[0]] for row in self.running}
        came, went = frame.get("kept", ([], []))
        assert not self.kept & set(came)
        assert self.kept >= set(went)
        self.kept = (self.kept | set(came)) - set(went)

    def view(self) -> dict[str, Any]:
        return {
            "tables": {self.ids[number]: table for number, table in self.tables.items()},
            "seats": {self.ids[row[0]]: (row[1], row[2]) for row in self.running},
            "waiting": (self.waiting[0], [self.ids[number] for number in self.waiting[1]]),
            "memory": list(self.memory),
            "kept": self.kept,
            "disk": list(self.disk),
        }


def truth(engine: Engine) -> dict[str, Any]:
    """Return the same state (`Reader.view`), read from the engine."""
    pool, scheduler = engine.runner.pool, engine.scheduler
    held = {request.request_id: request.slot for request in scheduler.active}
    waiting = [request.request_id for request in scheduler.waiting]
    return {
        "tables": {name: list(pool.block_table(slot)) for name, slot in held.items() if slot is not None},
        "seats": {
            name: (pool.seat(slot), pool.get_seq_len(slot)) for name, slot in held.items() if slot is not None
        },
        "waiting": (len(waiting), waiting[:WAITING_NAMED]),
        "memory": [pool.num_blocks, pool.block_size],
        "kept": set(pool.kept_blocks()),
        "disk": list(pool.disk_blocks()),
    }


def engine_of(phase: str, **options: Any) -> Engine:
    return build(phase, **(SLOTS if phase in ("static", "continuous") else TIGHT) | options)


def busy(engine: Engine, seed: int = 1) -> None:
    """Run random traffic: prompts with shared prefixes, cancelled requests, and more requests than memory."""
    draw = random.Random(seed)
    shared = [draw.randrange(250) for _ in range(12)]
    to_come = 40
    live: list[str] = []
    for _ in range(2000):
        if to_come and draw.random() < 0.5:
            to_come -= 1
            prompt = shared[: draw.randrange(13)] + [draw.randrange(250) for _ in range(draw.randint(1, 14))]
            live.append(add(engine, prompt, greedy(draw.randint(1, 18))).request_id)
        if live and draw.random() < 0.05:
            engine.cancel(draw.choice(live))
        if not engine.has_work and not to_come:
            return
        engine.step()
    raise AssertionError("the engine makes no progress")


@pytest.mark.parametrize("phase", PHASES)
def test_frames_give_the_engines_state_in_every_step(phase: str) -> None:
    engine = engine_of(phase)
    trace, known = StepTrace(engine), []
    engine.watchers.append(lambda *_: known.append(truth(engine)))
    busy(engine)

    frames = json.loads(json.dumps(trace.as_json()))["frames"]
    assert [frame["step"] for frame in frames] == [record.step for record in engine.telemetry.records]
    keys = [i for i, frame in enumerate(frames) if frame.get("key")]
    assert keys == list(range(0, len(frames), KEY_EVERY))
    assert len(keys) > 1
    for first in keys:
        reader = Reader()
        for frame, expected in zip(frames[first:], known[first:], strict=True):
            reader.read(frame)
            assert reader.view() == expected
    for frame, record in zip(frames, engine.telemetry.records, strict=True):
        work = [row[3:] for row in frame["running"]]
        assert sum(each[2] - each[1] for each in work if each[0] == "p") == record.prefill_tokens
        assert sum(each[3] for each in work if each[0] == "p") == record.padded_tokens
        assert sum(each[0] == "i" for each in work) == record.idle_rows
        assert sum(each[0] == "d" for each in work) == record.decode_tokens
    seated = {row[0] for frame in frames for row in frame["running"]}
    ended = [number for frame in frames for number, _ in frame.get("ended", ())]
    assert len(ended) == len(set(ended))
    assert set(ended) >= seated
    assert sum(len(frame.get("preempted", ())) for frame in frames) == engine.scheduler.preemptions
    if phase not in ("static", "continuous"):
        assert engine.scheduler.preemptions > 0
    if phase in ("prefix", "pipelined"):
        assert any(expected["kept"] for expected in known)


class Sparse:
    """Makes a frame of every third step."""

    def __init__(self, engine: Engine) -> None:
        self.maker = FrameMaker(engine)
        self.frames: list[dict[str, Any]] = []
        self.steps = 0
        engine.watchers.append(self.watch)

    def watch(self, record: StepRecord, plan: StepPlan, outputs: Sequence[StepOutput]) -> None:
        self.steps += 1
        self.maker.note(outputs)
        if self.steps % 3 == 0:
            self.frames.append(self.maker.frame(record, plan, outputs))


@pytest.mark.parametrize("phase", PHASES)
def test_steps_may_be_left_out(phase: str) -> None:
    engine = engine_of(phase)
    whole, sparse, known = StepTrace(engine), Sparse(engine), {}
    engine.watchers.append(lambda record, *_: known.setdefault(record.step, truth(engine)))
    busy(engine, seed=3)
    reader = Reader()
    for frame in sparse.frames:
        reader.read(frame)
        assert reader.view() == known[frame["step"]]
    assert len(sparse.frames) == len(whole.frames) // 3


def test_a_key_frame_has_the_whole_state() -> None:
    engine = build("paged", block_size=4)
    maker, frames = FrameMaker(engine), []
    engine.watchers.append(lambda *step: frames.append(maker.frame(*step)))
    add(engine, [1, 2, 3], greedy(5))
    engine.step()
    engine.step()
    assert "requests" not in frames[1]
    maker.next_is_key()
    engine.step()
    reader = Reader()
    reader.read(frames[2])
    assert reader.view() == truth(engine)
