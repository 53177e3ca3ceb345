"""Measures the cost of a grammar: compiling it, a mask for each token, and the decode step that waits for masks.

```text
masks    one matcher, alone        compile ─> mask ─> advance ─> mask ─> …       time of each mask
steps    an engine, without server  all answers free, then all answers in a JSON string, in turns
```

In the second table every sequence has a grammar of its own and is inside a JSON string, where most tokens are
allowed. That is where masks take longest.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Iterator

from benchmarks.micro import in_new_process, in_turns
from benchmarks.micro.engines import build_engine
from benchmarks.tables import Cell, MeasuredTable
from common.constrained.grammar import Grammar, GrammarCompiler
from common.engine.engine import Engine
from common.models.registry import open_checkpoint
from common.request import SamplingParams

PROMPT_TOKENS, NEW_TOKENS = 32, 64

#: Name, grammar, and an answer that it allows.
ANSWERS: dict[str, tuple[Grammar, str]] = {
    "one of three words": (Grammar.choice(["bear", "squirrel", "rabbit"]), "squirrel"),
    "a date, by a regular expression": (Grammar.regex(r"\d{4}-\d{2}-\d{2}"), "2026-11-25"),
    "an object of three fields, by a schema": (
        Grammar.json_schema(
            {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "age": {"type": "integer"},
                    "friends": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["name", "age", "friends"],
                "additionalProperties": False,
            }
        ),
        '{"name": "Mia", "age": 7, "friends": ["an old bear from the wood", "Tom", "a squirrel"]}',
    ),
    "any JSON object": (
        Grammar.json_object(),
        '{"story": "Once upon a time there was a kind old bear.", "pages": [1, 2, 3], "end": {"happy": true}}',
    ),
}
IN_A_STRING = Grammar.json_schema({"type": "string", "minLength": 100 * NEW_TOKENS})


def of_answer(compiler: GrammarCompiler, grammar: Grammar, token_ids: list[int]) -> tuple[float, list[float]]:
    """Return the milliseconds of compiling a grammar, and of computing the mask before each token of an answer."""
    began = time.perf_counter()
    matcher = compiler.new_matcher(grammar)
    compiled, masks = time.perf_counter() - began, []
    for token_id in token_ids:
        began = time.perf_counter()
        matcher.mask()
        masks.append((time.perf_counter() - began) * 1e3)
        matcher.advance(token_id)
    return compiled * 1e3, masks


def masks_of(model: str, repeats: int) -> Iterator[list[Cell]]:
    """Yield a row of the table of masks for each grammar in `ANSWERS`: the milliseconds of compiling the grammar
    and of its masks, with the tokenizer of `model`."""
    checkpoint = open_checkpoint(model)
    tokenizer = checkpoint.tokenizer()
    compiler = GrammarCompiler(tokenizer, checkpoint.config.eos_token_ids)
    try:
        for name, (grammar, text) in ANSWERS.items():
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            compiler.new_matcher(grammar)  # the first use is not timed
            turns = [of_answer(compiler, grammar, token_ids) for _ in range(repeats)]
            compiled = statistics.median(each for each, _ in turns)
            masks = [statistics.median(each) for each in zip(*(masks for _, masks in turns), strict=True)]
            worst = max(masks)
            yield [name, tokenizer.num_ids, compiled, len(masks), statistics.mean(masks), worst]
    finally:
        compiler.close()


def step_ms(engine: Engine, sequences: int, grammar: Grammar | None) -> float:
    """Serve a batch of greedy requests. Returns the mean milliseconds of a step in the middle of the answers."""
    params = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True, grammar=grammar)
    for number in range(sequences):
        prompt = [(7 * number + i) % 200 + 3 for i in range(PROMPT_TOKENS)]
        assert engine.add_request(engine.create_request(prompt, params))
    steps, before = [], time.perf_counter()
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter()
        if sum(output.token_id is not None for output in outputs) == sequences:
            steps.append(now - before)
        before = now
    return statistics.mean(steps[len(steps) // 4 : -len(steps) // 8]) * 1e3


def free_and_constrained(phase: str, model: str, sequences: int, repeats: int) -> list[float]:
    """Return the median milliseconds of a decode step: without grammars, and with a grammar for each sequence."""
    engine = build_engine(phase, model=model, max_batch_size=sequences, max_seq_len=2 * NEW_TOKENS)
    ways = {each: functools.partial(step_ms, engine, sequences, each) for each in (None, IN_A_STRING)}
    found = list(in_turns(ways, repeats).values())
    engine.grammars.close()
    return found


def costs(
    models: tuple[str, ...] = ("zoo:llama-tiny", "smollm2"),
    sequences: tuple[int, ...] = (1, 8),
    repeats: int = 3,
) -> Iterator[MeasuredTable]:
    """Time masks, and decode steps with and without grammars."""
    setup = {"median of": f"{repeats} turns"}
    yield MeasuredTable(
        name="constraint_masks",
        title="masks of a grammar, computed alone",
        setup=setup,
        columns=["grammar", "vocabulary", "compile, ms", "tokens", "mean mask, ms", "slowest mask, ms"],
        rows=[row for model in models for row in masks_of(model, repeats)],
    )
    rows: list[list[Cell]] = []
    for model, count, phase in itertools.product(models, sequences, ("8", "9")):
        free, constrained = in_new_process(free_and_constrained, phase, model, count, repeats)
        rows.append([model, count, f"phase {phase}", free, constrained, constrained / free])
    yield MeasuredTable(
        name="constraint_steps",
        title="a decode step of free answers, and of answers inside a JSON string",
        setup=setup,
        columns=["model", "sequences", "engine", "free, ms", "constrained, ms", "constrained / free"],
        rows=rows,
    )
