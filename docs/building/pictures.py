"""Pictures of schedules and of the position rule, drawn from the real schedulers and the rule itself.

A schedule is what a phase's own scheduler and KV pool decide for a few requests. Only the model is left out: every
token that a plan asks for simply comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from common.kv import KVShape
from common.phases import find_phase
from common.request import Request, RequestState, SamplingParams

SEATS = 3
CELL, GAP, LABEL = 22, 2, 58


@dataclass(frozen=True, slots=True)
class Client:
    """One request of the picture.

    Attributes:
        arrives: the step before which it comes.
        new_tokens: how many tokens it asks for.
    """

    name: str
    arrives: int
    new_tokens: int


CLIENTS = (
    Client("A", 0, 5),
    Client("B", 0, 12),
    Client("C", 0, 3),
    Client("D", 1, 4),
    Client("E", 2, 6),
    Client("F", 4, 3),
)


@dataclass(slots=True)
class Schedule:
    """What happened in each step.

    Attributes:
        cells: (step, seat) -> (client, "prefill", "decode" or "idle").
        waiting: names of those who waited, step by step.
        first_token, last_token: client -> step.
    """

    steps: int = 0
    cells: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    first_token: dict[str, int] = field(default_factory=dict)
    last_token: dict[str, int] = field(default_factory=dict)


def schedule(phase: str, clients: Sequence[Client] = CLIENTS, seats: int = SEATS) -> Schedule:
    """Run a phase's scheduler over some clients, one step at a time, as `Engine.step` does."""
    package = find_phase(phase)
    config = package.Config(max_batch_size=seats, max_seq_len=64)
    result = Schedule()
    scheduler = package.build_engine.scheduler(config, lambda: result.steps)  # a step takes a second
    pool = package.build_engine.pool(config, KVShape(1, 1, 1, torch.float32), torch.device("cpu"))
    to_come = list(clients)
    while to_come or scheduler.has_work:
        step = result.steps
        for client in [client for client in to_come if client.arrives <= step]:
            params = SamplingParams(max_new_tokens=client.new_tokens)
            scheduler.add_request(Request(client.name, [0, 0, 0], params))
            to_come.remove(client)
        for request in scheduler.retire():
            pool.release(request)
        if not to_come and not scheduler.has_work:
            break
        while preempted := scheduler.make_room(pool):
            for request in preempted:
                pool.release(request)
        scheduler.admit(pool)
        plan = scheduler.plan()
        seated = {request.request_id for request in scheduler.active}
        result.waiting.append(
            "".join(c.name for c in clients if c not in to_come and _waits(c, result, seated))
        )
        for request in [*plan.decode, *(chunk.request for chunk in plan.prefill)]:
            assert request.slot is not None
            kind = "idle" if request.is_terminal else _take_token(request)
            result.cells[step, request.slot] = (request.request_id, kind)
            if kind != "idle":
                result.first_token.setdefault(request.request_id, step)
                result.last_token[request.request_id] = step
        result.steps += 1
    return result


def _waits(client: Client, so_far: Schedule, seated: set[str]) -> bool:
    return client.name not in so_far.first_token and client.name not in seated


def _take_token(request: Request) -> str:
    """A token for a request that was planned: what kind of work it took."""
    kind = "prefill" if request.state is RequestState.PREFILL else "decode"
    if kind == "prefill":
        request.start_decode()
    request.token_ids.append(0)
    if request.num_generated_tokens >= request.params.max_new_tokens:
        request.finish("length")
    return kind


# ---------------------------------------------------------------------- on a page


def timeline(phase: str) -> str:
    """A phase's schedule of `CLIENTS` as a picture."""
    found = schedule(phase)
    width = LABEL + found.steps * (CELL + GAP)
    height = (SEATS + 2) * (CELL + GAP)
    shapes = [text(LABEL + s * (CELL + GAP) + CELL / 2, 15, str(s), "step") for s in range(found.steps)]
    shapes.append(text(0, 15, "step", "label"))
    shapes += [text(0, _y(seat) + 15, f"seat {seat}", "label") for seat in range(SEATS)]
    for (step, seat), (name, kind) in sorted(found.cells.items()):
        shapes.append(_cell(LABEL + step * (CELL + GAP), _y(seat), name, kind))
    shapes.append(text(0, _y(SEATS) + 15, "waiting", "label"))
    for step, names in enumerate(found.waiting):
        x = LABEL + step * (CELL + GAP) + CELL / 2
        shapes.append(text(x, _y(SEATS) + 15, names if len(names) < 3 else str(len(names)), "waiting"))
    title = f"{find_phase(phase).PHASE.title}: which request holds which seat in each step"
    legend = " ".join(
        f'<span class="key {kind}">{words}</span>'
        for kind, words in (
            ("prefill", "prompt, first token"),
            ("decode", "one more token"),
            *((("idle", "done, row kept"),) if "idle" in {kind for _, kind in found.cells.values()} else ()),
        )
    )
    return figure(width, height, shapes, title, legend)


def timeline_steps(phase: str) -> int:
    """Steps until the last of `CLIENTS` is done."""
    return schedule(phase).steps


def timeline_table(*phases: str) -> str:
    """When each client got its first and last token, under each phase."""
    found = {phase: schedule(phase) for phase in phases}
    titles = [find_phase(phase).PHASE for phase in phases]
    heads = [f"phase {p.number}: first token | done" for p in titles]
    rows = [
        f"| client | arrives before step | wants tokens | {' | '.join(heads)} |",
        f"| --- | ---: | ---: |{' ---: | ---: |' * len(phases)}",
    ]
    for client in CLIENTS:
        cells = [f"{s.first_token[client.name]} | {s.last_token[client.name]}" for s in found.values()]
        rows.append(f"| {client.name} | {client.arrives} | {client.new_tokens} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def visibility(*sequences: tuple[str, int, int, int | None]) -> str:
    """Which columns each token of a flat pass sees, sequence beside sequence.

    Args:
        sequences: (caption, first position, tokens in the pass, window or None).
    """
    longest = max(start + count for _, start, count, _ in sequences)
    shapes: list[str] = []
    y, size = 0, 20
    for caption, start, count, window in sequences:
        shapes.append(text(0, y + 15, caption, "label"))
        y += 22
        shapes += [
            text(LABEL + column * (size + 2) + size / 2, y + 11, str(column), "step")
            for column in range(start + count)
        ]
        y += 16
        for position in range(start, start + count):
            shapes.append(text(0, y + 15, f"at {position}", "label"))
            for column in range(start + count):
                seen = column <= position and (window is None or position - column < window)
                kind = "own" if column == position else "decode" if seen else "hidden"
                shapes.append(_square(LABEL + column * (size + 2), y, size, kind))
            y += size + 2
        y += 12
    legend = (
        '<span class="key own">itself</span> <span class="key decode">seen</span> '
        '<span class="key hidden">not seen</span>'
    )
    width = max(LABEL + longest * (size + 2), 340)
    return figure(width, y, shapes, "Which columns each token of the pass sees", legend)


def figure(width: float, height: float, shapes: Sequence[str], title: str, legend: str) -> str:
    svg = (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" '
        f'aria-label="{title}">{"".join(shapes)}</svg>'
    )
    return f'<div class="picture"><div class="scroll">{svg}</div><div class="legend">{legend}</div></div>\n'


def _y(seat: int) -> int:
    return (seat + 1) * (CELL + GAP)


def _cell(x: float, y: float, name: str, kind: str) -> str:
    return _square(x, y, CELL, kind) + text(x + CELL / 2, y + 15.5, name, f"on-{kind}")


def _square(x: float, y: float, size: float, kind: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{size}" height="{size}" rx="3" class="{kind}"/>'


def text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{text}</text>'
