"""Speculative decoding on texts that repeat themselves, and on texts that do not: phase 10 beside phase 9.

Both phases answer the same prompts in turns, each in a process of its own. A number of clients send one prompt
after another. The prompts are computed before the timed requests, so that hardly anything but decoding is timed. If
the answers of the two phases differ in any token, the measurement fails.
"""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from benchmarks.chats import CHATS
from benchmarks.micro import in_turns, processes, say
from benchmarks.micro.on_device import build_engine
from benchmarks.tables import Cell, MeasuredTable
from common.constrained.grammar import Grammar
from common.engine.engine import Engine
from common.request import SamplingParams

SEED = 1
NEW_TOKENS = 80

PEOPLE = {
    "type": "array",
    "minItems": 4,
    "items": {
        "type": "object",
        "properties": {
            "first_name": {"type": "string", "maxLength": 12},
            "family_name": {"type": "string", "maxLength": 12},
            "occupation": {"enum": ["teacher", "sailor", "baker", "librarian"]},
            "years_of_experience": {"type": "integer", "minimum": 1, "maximum": 40},
        },
        "required": ["first_name", "family_name", "occupation", "years_of_experience"],
        "additionalProperties": False,
    },
}


class Workload(NamedTuple):
    """The messages that clients send, and the sampling parameters of the answers.

    Attributes:
        messages: returns messages, given a random generator and the number of messages.
        temperature: 0 is greedy.
        grammar: every answer must match it; None: answers are free.
    """

    messages: Callable[[random.Random, int], list[str]]
    temperature: float = 0.0
    grammar: Grammar | None = None


def _of_chats(name: str) -> Callable[[random.Random, int], list[str]]:
    return lambda draw, count: [message for [message] in CHATS[name](draw, count, 1)]


def _stories(draw: random.Random, count: int) -> list[str]:
    heroes, places = (
        ("a cat", "a robot", "two sisters", "an old sailor"),
        ("a lighthouse", "a forest", "a market"),
    )
    pairs = list(itertools.product(heroes, places, ("rain", "snow")))
    return [f"Tell me a story about {a} in {b} in the {c}." for a, b, c in draw.sample(pairs, count)]


def _people(draw: random.Random, count: int) -> list[str]:
    return [
        f"Invent people who live in a town of {draw.randint(100, 9999)} inhabitants, as JSON."
        for _ in range(count)
    ]


WORKLOADS = {
    "edit": Workload(_of_chats("code_edits")),
    "json": Workload(_people, grammar=Grammar.json_schema(PEOPLE)),
    "quote": Workload(_of_chats("shared_document")),
    "stories": Workload(_stories),
    "chat": Workload(_of_chats("questions")),
    "chat, sampled": Workload(_of_chats("questions"), temperature=1.0),
}

_engine: Engine


class Found(NamedTuple):
    """The result of one run.

    Attributes:
        token_s: the run's seconds divided by the generated tokens of all clients.
        tokens: the generated tokens of each request.
        passes: number of forward passes.
        drafted, accepted: number of guesses that were computed, and of guesses among them that were accepted.
    """

    token_s: float
    tokens: tuple[tuple[int, ...], ...]
    passes: int
    drafted: int
    accepted: int


def start(phase: int, model: str, clients: int) -> None:
    """Build the engine of a phase, for at most `clients` requests at a time. `run` uses it, in the same process."""
    global _engine
    _engine = build_engine(
        str(phase),
        model=model,
        max_batch_size=clients,
        max_seq_len=3072,
        num_blocks=2000,
        pass_threads=torch.get_num_threads(),
    )


def run(workload: str, clients: int, requests: int) -> Found:
    """Serve `requests` requests of a workload twice, `clients` at a time. Returns the second round's result."""
    draw, wanted = random.Random(SEED), WORKLOADS[workload]
    template = _engine.maker.tokenizer.chat_template
    assert template is not None, "a model that chats"
    prompts = [
        template.render([{"role": "user", "content": message}]) for message in wanted.messages(draw, requests)
    ]
    for new_tokens in (1, NEW_TOKENS):  # the first round brings the prompts into the prefix cache
        before, passes = _engine.telemetry.counters, _engine.telemetry.counters.passes
        drafted, accepted = before.draft_tokens, before.accepted_tokens
        waiting = [
            _engine.maker.create(
                _engine.maker.tokenizer.encode(prompt, add_special_tokens=False),
                SamplingParams(
                    temperature=wanted.temperature, seed=i, max_new_tokens=new_tokens, grammar=wanted.grammar
                ),
                str(i),
            )
            for i, prompt in enumerate(prompts)
        ]
        tokens: dict[str, list[int]] = {request.request_id: [] for request in waiting}
        began_s = time.perf_counter()
        live = 0
        while waiting or live:
            while waiting and live < clients:
                _engine.add_request(waiting.pop(0))
                live += 1
            for output in _engine.step():
                assert output.token_id is not None, output.error
                tokens[output.request_id].append(output.token_id)
                live -= output.finished
        took_s = time.perf_counter() - began_s
        while _engine.has_work:
            _engine.step()
    counters = _engine.telemetry.counters
    return Found(
        took_s / sum(map(len, tokens.values())),
        tuple(map(tuple, tokens.values())),
        counters.passes - passes,
        counters.draft_tokens - drafted,
        counters.accepted_tokens - accepted,
    )


def compare(
    model: str = "smollm2",
    workloads: tuple[str, ...] = tuple(WORKLOADS),
    clients: tuple[int, ...] = (1, 4, 16),
    turns: int = 2,
) -> Iterator[MeasuredTable]:
    """Time a token of phase 9 and of phase 10, by workload and number of clients.

    Args:
        model: a model that chats
        turns: runs of each phase, taken in turns; the median counts
    """
    table = MeasuredTable(
        name="speculative",
        title="a token with guesses and without",
        setup={"model": model, "answers": f"up to {NEW_TOKENS} tokens", "median of": f"{turns} turns"},
        columns=[
            "workload, clients",
            "phase 9, ms a token",
            "phase 10, ms a token",
            "phase 9 ÷ phase 10",
            "tokens a pass",
            "guesses",
            "came true",
        ],
        rows=[],
    )
    latest: dict[int, Found] = {}
    with processes((9, 10)) as started:
        for phase, process in started.items():
            process.submit(start, phase, model, max(clients)).result()

        def token_ms(phase: int, workload: str, count: int) -> float:
            latest[phase] = started[phase].submit(run, workload, count, max(4, min(16, 2 * count))).result()
            return 1e3 * latest[phase].token_s

        for count, workload in itertools.product(clients, workloads):
            ms = in_turns({n: functools.partial(token_ms, n, workload, count) for n in started}, turns)
            assert latest[9].tokens == latest[10].tokens, f"{workload}: the answers differ"
            found = latest[10]
            tokens_a_pass = sum(map(len, found.tokens)) / found.passes
            rate = found.accepted / found.drafted if found.drafted else None
            row: list[Cell] = [f"{workload}, {count}", ms[9], ms[10], ms[9] / ms[10]]
            table.rows.append([*row, tokens_a_pass, found.drafted, rate])
            say(
                f"{workload}, {count}: {ms[9]:.2f} and {ms[10]:.2f} ms, {tokens_a_pass:.2f} a pass, rate {rate}"
            )
            yield table
