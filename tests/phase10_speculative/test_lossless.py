"""Tokens and log-probabilities have the bits of a request alone, with any guesses."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from common.constrained.grammar import GrammarCompiler
from common.engine.reference import generate
from common.models.layers import CausalLM
from common.models.registry import load_model, open_checkpoint
from common.request import Request, SamplingParams, StepOutput
from common.startup.phases import find_phase
from tests.support.drafts import Guess, let_guess
from tests.support.grammars import FORMS

Answers = dict[str, list[StepOutput]]


@functools.cache
def load(dtype: str) -> CausalLM:
    checkpoint = open_checkpoint("zoo:llama-tiny")
    loaded = load_model(
        checkpoint, device=torch.device("cpu"), dtype=getattr(torch, dtype), max_positions=512
    )
    loaded.pack()
    loaded.measure_batch_invariance()
    return loaded


@pytest.fixture
def model(request: pytest.FixtureRequest) -> CausalLM:
    loaded = load(request.param)
    if not loaded.batch_invariant:
        pytest.skip(f"{request.param} is not batch invariant here")
    return loaded


def requests_of(engine: Any) -> list[Request]:
    """Return requests of every kind: greedy, sampled, filters, penalties, biases, endings, grammars, bad words."""
    draw = random.Random(3)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.8, "seed": 2, "top_p": 0.9, "top_k": 40},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.2},
        {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.7, "logit_bias": ((5, 4.0), (9, -3.0))},
        {"temperature": 1.0, "seed": 4, "min_p": 0.05, "min_tokens": 12},
        {"temperature": 0.0, "stop_token_ids": tuple(range(0, 1000, 40)), "min_tokens": 5},
        {"temperature": 1.0, "seed": 5, "stop": ("e ",)},
        *({"temperature": 1.0, "seed": 6 + i, "grammar": form.grammar} for i, form in enumerate(FORMS[:6])),
        {"temperature": 0.0, "grammar": FORMS[0].grammar},
        {"temperature": 0.0, "bad_words": ("the", "fox", "to the", "in a", "e")},
        {"temperature": 1.0, "seed": 20, "bad_words": ("he", ". She", "q"), "min_tokens": 4},
        {"temperature": 1.0, "seed": 21, "allowed_token_ids": tuple(range(0, 1000, 3))},
        {"temperature": 0.0, "grammar": FORMS[1].grammar, "bad_words": ("x",)},
    ]
    return [
        engine.create_request(
            [draw.randrange(engine.runner.model.config.vocab_size) for _ in range(draw.randint(1, 40))],
            SamplingParams(
                **({"logprobs": 3, "ignore_eos": "grammar" not in kind, "max_new_tokens": 24} | kind)
            ),
            str(number),
        )
        for number, kind in enumerate(kinds)
    ]


def bits(outputs: Sequence[StepOutput]) -> list[Any]:
    return [
        (o.token_id, o.text_delta, o.logprobs, o.finish_reason, o.completion_tokens, o.finished)
        for o in outputs
    ]


def engine_of(model: CausalLM, phase: str, **options: Any) -> Any:
    package = find_phase(phase)
    config = package.Config(max_batch_size=6, max_seq_len=256, max_waiting_requests=64, **options)
    tokenizer = open_checkpoint("zoo:llama-tiny").tokenizer()
    engine = package.build_engine(config, model=model, tokenizer=tokenizer)
    engine.grammars = grammars_of(model)
    return engine


@functools.cache
def grammars_of(model: CausalLM) -> GrammarCompiler:
    """Return a compiler that tries each grammar once for all engines of a model."""
    return GrammarCompiler(open_checkpoint("zoo:llama-tiny").tokenizer(), model.config.eos_token_ids)


@functools.cache
def answers_of(model: CausalLM) -> dict[str, list[Any]]:
    engine = engine_of(model, "phase10_speculative", draft_length=0)
    return {request.request_id: bits(list(generate(model, request))) for request in requests_of(engine)}


@pytest.fixture
def alone(model: CausalLM) -> dict[str, list[Any]]:
    return answers_of(model)


def oracle(alone: dict[str, list[Any]], right: int, then: int) -> Guess:
    """Return a function that guesses `right` tokens right. To the ids of later ones it adds `then`."""

    def guess(request: Request, token_ids: Sequence[int], limit: int) -> list[int]:
        known = len(token_ids) - request.num_prompt_tokens
        answer = [token for token, *_ in alone[request.request_id]]
        following = [*answer[known : known + limit], *[1, 2, 3] * limit][:limit]
        wrong = [(token + then) % 1000 for token in following[right:]]
        return following[:right] + wrong

    return guess


OPTIONS: list[dict[str, Any]] = [
    {"draft_length": 1},
    {"draft_length": 15, "draft_rows": 128},
    {"draft_length": 5, "draft_rows": 9, "prefill_chunk_size": 7},
    {"draft_length": 8, "block_size": 4, "num_blocks": 64},
    {"draft_length": 7, "pipeline_depth": 0},
    {"draft_length": 7, "pipeline_depth": 1, "captured_steps": False, "mixed_batches": False},
]
#: Guesses: how many tokens are right, and what is added to the ids of later ones.
GUESSES = [(15, 0), (0, 1), (2, 1), (1, 40)]


@pytest.mark.parametrize(
    ("model", "options", "right", "then"),
    [
        *(("bfloat16", options, *guess) for options in OPTIONS for guess in GUESSES),
        *(("float32", options, *GUESSES[number % 4]) for number, options in enumerate(OPTIONS)),
    ],
    indirect=["model"],
    ids=str,
)
def test_the_bits_of_a_request_alone(
    right: int, then: int, options: dict[str, Any], model: CausalLM, alone: dict[str, list[Any]]
) -> None:
    engine = engine_of(model, "phase10_speculative", **({"draft_rows": 64} | options))
    let_guess(engine, oracle(alone, right, then))
    waiting = requests_of(engine)
    found: Answers = {request.request_id: [] for request in waiting}
    while waiting or engine.has_work:
        for request in waiting[:2]:
            engine.add_request(request)
        del waiting[:2]
        for output in engine.step():
            found[output.request_id].append(output)
    assert {name: bits(outputs) for name, outputs in found.items()} == alone
    counters = engine.telemetry.counters
    assert counters.draft_tokens > 20
    assert (counters.failed_passes, counters.failed_drafters, counters.reclaimed_slots) == (0, 0, 0)
    if right:
        assert counters.accepted_tokens > 20
    if options.get("num_blocks"):
        assert counters.preemptions + counters.evictions > 0
    assert sum(engine.telemetry.accepted_at) == counters.accepted_tokens
    ends = [outputs[-1] for outputs in found.values()]
    assert sum(end.accepted_tokens for end in ends) == counters.accepted_tokens
    assert sum(end.draft_tokens for end in ends) == counters.draft_tokens
