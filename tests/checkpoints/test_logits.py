"""Logits, greedy texts and perplexity of real models, alone and under load, in every phase."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from common.devices.resolve import resolve_dtype
from common.engine.engine import Engine
from common.engine.reference import generate
from common.models.layers import CausalLM
from common.request import Request, SamplingParams, StepOutput
from common.startup.phases import find_phase, phase_names
from tests.checkpoints.conftest import RealModel
from tests.support.models import largest_difference, solo_logits

pytestmark = [pytest.mark.checkpoints, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
#: A long text: two pages of this documentation.
PAGE = "".join((ROOT / "docs" / name).read_text() for name in ("kv-memory.md", "limits.md"))

PROMPTS = [
    "The capital of France is", "Once upon a time there was a fox who", "Water boils at",
    "def fibonacci(n):\n", "Question: What is the largest planet?\nAnswer:",
    "The three primary colours are", "Dear Sir or Madam,\n\n", "1, 2, 3, 4, 5,", "In 1969, humans first",
    "The opposite of hot is", "To make bread you need", "SELECT name FROM users WHERE",
    "La capitale de l'Italie est", "# Chapter 1\n\n", "My favourite season is", "The quick brown fox",
    "E = mc", "Photosynthesis is the process", "import numpy as np\n\n", "She looked at the sky and",
]  # fmt: skip
TEXTS = [
    *PROMPTS[:5],
    "\n".join(PROMPTS),
    PAGE[:600],
    PAGE[600:3400],
]  # the last is longer than Gemma's window
NEW_TOKENS = 64


def serve(
    engine: Engine, requests: list[tuple[list[int], SamplingParams]], a_step: int
) -> list[list[StepOutput]]:
    """Serve requests, `a_step` of which arrive in each step. Returns the outputs of each."""
    waiting = list(enumerate(requests))
    found: list[list[StepOutput]] = [[] for _ in requests]
    while waiting or engine.has_work:
        for number, (prompt, params) in waiting[:a_step]:
            engine.add_request(engine.maker.create(prompt, params, request_id=str(number)))
        del waiting[:a_step]
        for output in engine.step():
            assert output.error is None
            found[int(output.request_id)].append(output)
    return found


def engine_of(model: CausalLM, real: RealModel, phase: str, **options: Any) -> Engine:
    package = find_phase(phase)
    config = package.Config(max_seq_len=1024, **options)
    engine: Engine = package.build_engine(config, model=model, tokenizer=real.tokenizer)
    return engine


def test_logits_are_those_of_transformers(real: RealModel) -> None:
    for text in TEXTS:
        ids = real.tokenizer.encode(text)
        expected = real.oracle_logits(ids)
        assert largest_difference(solo_logits(real.model, ids), expected) < 1e-4 * expected.abs().max().item()
    assert len(ids) > 600


@pytest.fixture(scope="module")
def answers(real: RealModel) -> list[list[int]]:
    """The first phase's greedy answers, in float32."""
    return greedy(real, phase_names()[0])


def greedy(real: RealModel, phase: str) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS)
    requests = [(real.tokenizer.encode(text), params) for text in PROMPTS]
    outputs = serve(engine_of(real.model, real, phase, max_batch_size=20), requests, a_step=20)
    return [[o.token_id for o in one if o.token_id is not None] for one in outputs]


def test_greedy_texts_are_those_of_transformers(real: RealModel, answers: list[list[int]]) -> None:
    """At every position, the written token is also the most probable one for transformers."""
    for text, answer in zip(PROMPTS, answers, strict=True):
        prompt = real.tokenizer.encode(text)
        best = real.oracle_logits([*prompt, *answer])[len(prompt) - 1 : -1].argmax(dim=-1)
        assert best.tolist() == answer, text
    assert sum(map(len, answers)) > 15 * NEW_TOKENS


def test_the_last_phase_writes_the_same(real: RealModel, answers: list[list[int]]) -> None:
    """The phases between them compute in bfloat16 below, where the same bits are a sharper comparison."""
    assert greedy(real, phase_names()[-1]) == answers


# ---------------------------------------------------------------------- under load

#: Options that make memory run out, and cut prompts where no block ends.
TIGHT: dict[str, Any] = {"num_blocks": 25, "prefill_chunk_size": 33}


def loads() -> list[tuple[str, dict[str, Any]]]:
    """Every phase as it comes, and the first and the last with blocks once more with the tight options."""
    with_blocks = [name for name in phase_names() if "num_blocks" in find_phase(name).Config.model_fields]
    tight = [
        (name, {key: value for key, value in TIGHT.items() if key in find_phase(name).Config.model_fields})
        for name in (with_blocks[0], with_blocks[-1])
    ]
    return [*((name, {}) for name in phase_names()), *tight]


@pytest.fixture(scope="module")
def served(real: RealModel) -> CausalLM:
    """The model as it is served: in bfloat16, or in float32 if the processor has no instructions for bfloat16."""
    model = real.load(resolve_dtype("auto", torch.bfloat16, torch.device("cpu")))
    if not model.batch_invariant:
        pytest.skip(f"{model.dtype} is not batch invariant here")
    return model


@pytest.fixture(scope="module")
def requests(real: RealModel) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 5 to 300 tokens. The last two begin like earlier ones."""
    page = real.tokenizer.encode(PAGE)
    prompts = [real.tokenizer.encode(text) for text in PROMPTS[:6]]
    prompts += [page[:300], page[300:420], page[:200], page[:310]]
    return [
        (
            prompt,
            SamplingParams(
                temperature=0.5 * (number % 2),
                seed=number,
                logprobs=3,
                ignore_eos=True,
                max_new_tokens=60 if len(prompt) < 20 else 24,  # short prompts outgrow a small pool
            ),
        )
        for number, prompt in enumerate(prompts)
    ]


def bits(outputs: list[StepOutput]) -> list[tuple[int | None, Any]]:
    return [(output.token_id, output.logprobs) for output in outputs]


@pytest.fixture(scope="module")
def alone(real: RealModel, served: CausalLM, requests: Any) -> list[Any]:
    eos = real.checkpoint.config.eos_token_ids
    return [bits(list(generate(served, Request("alone", *request, eos)))) for request in requests]


@pytest.mark.parametrize(("phase", "options"), loads(), ids=str)
def test_a_request_has_the_same_bits_alone_and_under_load(
    phase: str, options: dict[str, Any], real: RealModel, served: CausalLM, requests: Any, alone: list[Any]
) -> None:
    engine = engine_of(served, real, phase, max_batch_size=6, **options)
    assert [bits(one) for one in serve(engine, requests, a_step=2)] == alone
    if "num_blocks" in options:
        # Guesses that come true end answers earlier, perhaps before memory runs out.
        assert engine.telemetry.counters.preemptions or engine.telemetry.counters.accepted_tokens
    if "enable_prefix_caching" in find_phase(phase).Config.model_fields and not options:
        assert [bits(one) for one in serve(engine, requests, a_step=5)] == alone, "found in the cache"


# ---------------------------------------------------------------------- perplexity


def perplexity(logits: torch.Tensor, ids: list[int]) -> float:
    """Return the perplexity, computed in float64 and in parts: all rows at once would take gigabytes."""
    rows = zip(logits[:-1].split(128), torch.tensor(ids[1:]).split(128), strict=True)
    losses = [
        torch.nn.functional.cross_entropy(each.double(), right, reduction="sum") for each, right in rows
    ]
    return math.exp(sum(loss.item() for loss in losses) / (len(ids) - 1))


def test_perplexity_is_that_of_transformers(real: RealModel) -> None:
    ids = real.tokenizer.encode(PAGE)[:2000]
    assert len(ids) == 2000
    ours, theirs = perplexity(solo_logits(real.model, ids), ids), perplexity(real.oracle_logits(ids), ids)
    assert ours == pytest.approx(theirs, rel=1e-3)
    assert 2 < ours < 100
