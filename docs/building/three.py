"""Tables of the course's three requests: times and memory in each phase, simulated with the phase's scheduler.

They are requests 1 to 3 of the stepper's story `three`. Steps take the same simulated time as in the stepper, so a
table and the picture above it agree.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from common.engine.scheduling import StepPlan
from common.engine.telemetry import StepRecord
from common.request import StepOutput
from common.startup.phases import find_phase, phase_names
from docs.building.markdown import table
from docs.building.stepper import ACCEPTANCE, COST, STORIES, Setting
from simulator import Timelines, run, simulate_engine

STORY = "three"

#: The three requests by their index in the story, with the stepper's letters. Request 0 is the chat's first turn.
NAMES = {1: "**B**, a short question", 2: "**C**, a long document", 3: "**D**, a chat's next turn"}

SEATS, BLOCKS, CHUNK = 4, 40, 16  # the settings with which the stepper opens


@dataclass(frozen=True, slots=True)
class Served:
    """A request's times under one phase, in milliseconds after the request was sent, and its memory.

    Attributes:
        waited: when the first part of its prompt was planned.
        first: when its first token arrived.
        gap: the longest time between two successive tokens, in milliseconds.
        finished: when its last token arrived.
        held: the largest number of tokens for which it had KV memory.
    """

    waited: int
    first: int
    gap: int
    finished: int
    held: int


@functools.cache
def served(phase: int) -> dict[int, Served]:
    """Simulate the story on a phase. Returns the times and memory of each of the three requests, by its index."""
    options = Setting(phase, SEATS, BLOCKS, CHUNK, STORY).options()
    engine = simulate_engine(phase, COST, acceptance=ACCEPTANCE, **options)
    pool = engine.runner.pool
    planned: dict[str, float | None] = {}
    held: dict[str, int] = {}

    def watch(_record: StepRecord, _plan: StepPlan, _outputs: Sequence[StepOutput]) -> None:
        for request in engine.scheduler.active:
            assert request.slot is not None, f"{request.request_id} has a seat and no memory"
            tokens = len(pool.block_table(request.slot)) * pool.block_size
            planned[request.request_id] = request.scheduled_s
            held[request.request_id] = max(tokens, held.get(request.request_id, 0))

    engine.watchers.append(watch)
    seen = Timelines()
    run(engine, STORIES[STORY].arrivals(), seen)
    found = {}
    for record in seen.requests:
        if record.index in NAMES:
            name, times = str(record.index), record.token_times_s
            began_s = planned[name]
            assert began_s is not None, f"request {name} has an answer and was never planned"
            gap_s = max(later - earlier for earlier, later in itertools.pairwise(times))
            spans = (began_s - record.sent_s, times[0] - record.sent_s, gap_s, times[-1] - record.sent_s)
            found[record.index] = Served(*(round(1000 * each) for each in spans), held=held[name])
    return found


def three_requests(phase: int) -> str:
    """Return the table of the three requests under a phase. If the phase before has another value, a cell has both
    values: `before → now`."""
    now = served(phase)
    numbers = [find_phase(name).PHASE.number for name in phase_names()]
    before = served(phase - 1) if phase - 1 in numbers else now

    def cell(old: int, new: int) -> str:
        return f"{new}" if old == new else f"{old} → **{new}**"

    rows = []
    for index, name in NAMES.items():
        old, new = before[index], now[index]
        cells = [(old.waited, new.waited), (old.first, new.first), (old.gap, new.gap)]
        cells += [(old.finished, new.finished), (old.held, new.held)]
        rows.append([name, *itertools.starmap(cell, cells)])
    head = ["request", "waited, ms", "first token, ms", "longest gap, ms", "finished, ms", "memory, tokens"]
    return table(head, rows)


def three_phases() -> str:
    """Return the table of each phase's times for the three requests: first token / last token, in milliseconds."""
    rows = []
    for name in phase_names():
        phase = find_phase(name).PHASE
        found = served(phase.number).values()
        page = f"phases/{name.partition('_')[2]}.md"
        cells = [f"{each.first} / {each.finished}" for each in found]
        rows.append([f"[{phase.number}: {phase.title.lower()}]({page})", *cells])
    return table(["phase", *(name.replace("**", "") for name in NAMES.values())], rows)
