"""Engines on a GPU, and the same tests on a CPU.

`make gpu` on a machine without a GPU runs them with Triton's interpreter (INFER_INTERPRET_TRITON=true).
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from common.engine.engine import Engine
from common.engine.reference import generate
from common.models.layers import CausalLM, TokenBatch
from common.request import Request, SamplingParams, StepOutput
from common.startup.phases import find_phase, phase_names
from common.text.tokenizer import Tokenizer
from tests.support.engines import assert_all_free

MODELS = ("zoo:llama-tiny", "zoo:qwen3-tiny", "zoo:gemma3-tiny")
#: On a CPU one model is enough: the interpreter takes seconds for a step.
PLACES = [
    pytest.param(("cpu", MODELS[0]), id="cpu"),
    *(pytest.param(("cuda", name), marks=pytest.mark.gpu, id=f"cuda-{name}") for name in MODELS),
]
LENGTHS = (3, 18, 1, 9)
#: `num_blocks` is given because a pool takes most of a GPU's memory by default, which other tests need.
OPTIONS = {
    "max_batch_size": 3,
    "max_seq_len": 64,
    "num_blocks": 12,
    "prefill_chunk_size": 16,
    "draft_rows": 16,
}

Loaded = tuple[CausalLM, Tokenizer]
Orders = list[tuple[list[int], SamplingParams]]


def load(name: str, device: str, dtype: str) -> Loaded:
    """Load a model as a server does."""
    package = find_phase("4")
    config = package.Config(model=name, device=device, dtype=dtype, max_seq_len=64, max_batch_size=1)
    engine: Engine = package.build_engine(config)
    return engine.runner.model, engine.maker.tokenizer


@pytest.fixture(scope="module", params=PLACES)
def exact(request: pytest.FixtureRequest) -> Loaded:
    """A model in float32."""
    device, name = request.param
    return load(name, device, "float32")


@pytest.fixture(scope="module")
def greedy(exact: Loaded) -> Orders:
    """Greedy requests, the first with a penalty."""
    (prompt, params), *others = orders(exact[0].config.vocab_size, temperature=0.0)
    return [(prompt, dataclasses.replace(params, repetition_penalty=1.4)), *others]


@pytest.fixture(scope="module")
def alone(exact: Loaded, greedy: Orders) -> list[list[int | None]]:
    """The tokens that each request gets alone."""
    return tokens([list(generate(exact[0], Request("alone", prompt, params))) for prompt, params in greedy])


def build(phase: str, loaded: Loaded, **options: Any) -> Engine:
    package = find_phase(phase)
    known = {key: value for key, value in (OPTIONS | options).items() if key in package.Config.model_fields}
    engine: Engine = package.build_engine(package.Config(**known), model=loaded[0], tokenizer=loaded[1])
    return engine


def orders(vocab_size: int, **values: Any) -> Orders:
    draw = random.Random(3)
    return [
        (
            [draw.randrange(vocab_size) for _ in range(length)],
            SamplingParams(max_new_tokens=3 + length % 3, ignore_eos=True, seed=length, **values),
        )
        for length in LENGTHS
    ]


def serve(engine: Engine, given: Orders) -> list[list[StepOutput]]:
    """Serve all requests together. Returns the outputs of each."""
    for number, (prompt, params) in enumerate(given):
        assert engine.add_request(engine.maker.create(prompt, params, str(number)))
    outputs: list[list[StepOutput]] = [[] for _ in given]
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output
            outputs[int(output.request_id)].append(output)
    assert_all_free(engine)
    return outputs


def tokens(outputs: list[list[StepOutput]]) -> list[list[int | None]]:
    return [[output.token_id for output in each] for each in outputs]


@pytest.mark.parametrize("phase", phase_names())
def test_every_phase_gives_the_tokens_of_one_request_alone(
    phase: str, exact: Loaded, greedy: Orders, alone: list[list[int | None]]
) -> None:
    assert tokens(serve(build(phase, exact), greedy)) == alone


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("phase", phase_names()[1:])
def test_bits_in_bfloat16_are_the_same_alone_and_beside_others(phase: str, name: str) -> None:
    """Log-probabilities are equal only if all logits of the row are equal."""
    loaded = load(name, "cuda", "bfloat16")
    given = orders(loaded[0].config.vocab_size, temperature=1.0, logprobs=5)
    crowd = serve(build(phase, loaded), given)
    engine = build(phase, loaded)
    for each, together in zip(given, crowd, strict=True):
        (single,) = serve(engine, [each])
        assert [(o.token_id, o.logprobs) for o in together] == [(o.token_id, o.logprobs) for o in single]


class FailsOnce:
    """A model whose fourth pass fails."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self._passes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, batch: TokenBatch, view: Any) -> torch.Tensor:
        self._passes += 1
        if self._passes == 4:
            raise RuntimeError("this pass fails")
        return self._model(batch, view)


@pytest.mark.parametrize("phase", ["phase7_chunked", "phase9_pipelined", "phase10_speculative"])
def test_a_failed_pass_changes_no_token(
    phase: str, exact: Loaded, greedy: Orders, alone: list[list[int | None]]
) -> None:
    engine = build(phase, exact, captured_steps=False)
    runner: Any = engine.runner
    runner.model = FailsOnce(exact[0])
    assert tokens(serve(engine, greedy)) == alone
    assert engine.telemetry.counters.failed_passes > 0
