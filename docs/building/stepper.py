"""The stepper: traces of every phase for a grid of settings, made when the site is built.

Schedulers, pools and the engine's step are the real ones. `simulator` stands in for the model and for time: each
pass takes a fixed time, plus a time for each of its tokens.

```text
docs/building/stepper.py    a file for each setting of each phase    assets/steps/p7-s4-b40-c16-long.js
common/server/page/viewer        the script that draws them               assets/viewer.js, as servers have it
docs/assets/stepper.js      the controls; loads a file when its setting is chosen
```

The files are scripts, because a page that was opened from disk may load scripts but not JSON.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.observing.frames import StepTrace
from common.startup.phases import find_phase, phase_names
from simulator import Arrival, LinearCost, Timelines, run, simulate_engine

MAX_SEQ_LEN, BLOCK_SIZE = 128, 8
SEATS, BLOCKS, CHUNKS = (2, 4, 8), (24, 40, 64), (16, 64)

#: The times in the stepper: a pass takes a fixed time, plus the same time for each prompt token and decode token.
COST = LinearCost(pass_base_s=0.010, token_s=0.0006, row_s=0.0006, host_step_s=0.003)

ACCEPTANCE = 0.7  # the probability that a guess of phase 10 is right

PHASES_WITH_BLOCKS, PHASES_WITH_CHUNKS = 6, 7


@dataclass(frozen=True, slots=True)
class Story:
    """The requests of a trace.

    Attributes:
        title: the name that the page shows.
        clients: for each request its arrival in seconds, the number of prompt tokens of its own, and the number of
            tokens that it asks for.
        shared: the number of tokens that all prompts begin with.
        turns: for each request that continues a chat, the index of the request before it. Its arrival counts from
            the end of that request's answer, and its prompt begins with that request's prompt and answer.
    """

    title: str
    clients: Sequence[tuple[float, int, int]]
    shared: int = 0
    turns: Mapping[int, int] = field(default_factory=dict)

    def arrivals(self) -> Iterator[Arrival]:
        common = list(range(1, self.shared + 1))
        for index, (at_s, prompt, new) in enumerate(self.clients):
            own = range(1000 * (index + 1), 1000 * (index + 1) + prompt)
            before = self.turns.get(index)
            yield Arrival(index, at_s, [*common, *own], new, after=before, continues=before is not None)


STORIES = {
    "three": Story(
        "a question, a document, a chat's next turn",
        [(0.00, 32, 14), (0.06, 10, 12), (0.11, 88, 10), (0.02, 8, 10)],
        turns={3: 0},
    ),
    "mixed": Story(
        "answers of all lengths",
        [
            (0.00, 12, 5), (0.00, 20, 26), (0.00, 8, 4), (0.00, 16, 7), (0.06, 10, 5), (0.09, 24, 12),
            (0.14, 8, 4), (0.20, 14, 16), (0.24, 12, 6), (0.30, 18, 9),
        ],
    ),
    "long": Story(
        "a long prompt among short ones",
        [(0.00, 10, 30), (0.00, 14, 26), (0.08, 104, 10), (0.12, 12, 14), (0.20, 8, 10), (0.26, 88, 8)],
    ),
    "prefix": Story(
        "prompts that begin alike",
        [
            (0.00, 6, 8), (0.03, 10, 6), (0.06, 5, 12), (0.10, 9, 5), (0.18, 7, 8), (0.24, 12, 6),
            (0.32, 5, 8), (0.40, 8, 5),
        ],
        shared=56,
    ),
    "crowd": Story(
        "many at once",
        [(0.0, 8 + 5 * (i % 4), 8 + 7 * ((i * 3) % 5)) for i in range(14)],
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """A position of the stepper's sliders, and so one trace: a phase, its options, and the requests that arrive.

    `story` is the name of the requests in `STORIES`. `mark` is put after the phase's number: "-yours" for a
    learner's copy (see `tutor.stepping`).
    """

    phase: int
    seats: int
    blocks: int
    chunk: int
    story: str
    mark: str = ""

    @property
    def name(self) -> str:
        """The name of the trace's file, by which `stepper.js` loads it. Sizes that the phase lacks are left out."""
        parts = [f"p{self.phase}{self.mark}", f"s{self.seats}"]
        if self.phase >= PHASES_WITH_BLOCKS:
            parts.append(f"b{self.blocks}")
        if self.phase >= PHASES_WITH_CHUNKS:
            parts.append(f"c{self.chunk}")
        return "-".join([*parts, self.story])

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"max_batch_size": self.seats, "max_seq_len": MAX_SEQ_LEN}
        if self.phase >= PHASES_WITH_BLOCKS:
            options |= {"block_size": BLOCK_SIZE, "num_blocks": self.blocks}
        if self.phase >= PHASES_WITH_CHUNKS:
            options["prefill_chunk_size"] = self.chunk
        return options


def settings() -> list[Setting]:
    """Return every position of the sliders. Of positions with the same name, only one is returned."""
    numbers = [find_phase(name).PHASE.number for name in phase_names()]
    grid = itertools.product(numbers, SEATS, BLOCKS, CHUNKS, STORIES)
    return list({setting.name: setting for setting in itertools.starmap(Setting, grid)}.values())


def trace(setting: Setting) -> dict[str, Any]:
    """Simulate the phase and the story of a setting, and return the trace of all steps."""
    engine = simulate_engine(setting.phase, COST, acceptance=ACCEPTANCE, **setting.options())
    steps = StepTrace(engine)
    run(engine, STORIES[setting.story].arrivals(), Timelines())
    found = steps.as_json()
    if setting.mark:
        found["header"]["phase"][0] = f"{setting.phase}{setting.mark}"
    return found


def script(setting: Setting) -> str:
    """Return the trace of a setting as a script that a page loads."""
    return f"stepTraces[{setting.name!r}]={json.dumps(trace(setting), separators=(',', ':'))};\n"


def stepper(
    left: int | str,
    right: int | str,
    story: str,
    *,
    copies: Mapping[str, str] | None = None,
    seats: int = 4,
    blocks: int = 40,
    chunk: int = 16,
    root: str = "",
) -> str:
    """Return the stepper for a page, opened at these settings.

    Args:
        left, right: the phases that are shown beside each other at first.
        story: the name of the story in `STORIES` that is shown at first.
        copies: titles of further phases, such as {"5-yours": "Continuous batching"}.
        root: the relative path from the page to the site's root.
    """
    phases = [find_phase(name).PHASE for name in phase_names()]
    choices = {
        "seats": SEATS,
        "blocks": BLOCKS,
        "chunks": CHUNKS,
        "stories": {name: each.title for name, each in STORIES.items()},
        "phases": {str(phase.number): phase.title for phase in phases} | dict(copies or {}),
        "blocks_from": PHASES_WITH_BLOCKS,
        "chunks_from": PHASES_WITH_CHUNKS,
        "max_seq_len": MAX_SEQ_LEN,
        "block_size": BLOCK_SIZE,
    }
    opened = {"left": left, "right": right, "story": story, "seats": seats, "blocks": blocks, "chunk": chunk}
    data = json.dumps({"choices": choices, "opened": opened}).replace("<", "\\u003c")
    still = (
        "<p>This picture moves and needs JavaScript. Pictures that do not move are on the pages of "
        f'<a href="{root}phases/static.html#a-picture">phase 4</a> and '
        f'<a href="{root}phases/continuous.html#a-picture">phase 5</a>.</p>'
    )
    return (
        f'<div class="stepper"><script type="application/json">{data}</script>{still}</div>\n'
        f'<script src="{root}assets/viewer.js"></script><script src="{root}assets/stepper.js"></script>\n'
    )
