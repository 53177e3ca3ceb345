"""Engines on a GPU, and the same tests on a CPU.

`make gpu` on a machine without a GPU runs them with Triton's interpreter (INFER_INTERPRET_TRITON=true).
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from common.engine import Engine
from common.generate import generate
from common.models.layers import CausalLM, TokenBatch
from common.models.registry import load_model, open_checkpoint
from common.phases import find_phase, phase_names
from common.request import Request, SamplingParams, StepOutput
from common.text import Tokenizer
from tests.engine_helpers import assert_all_free

DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", marks=pytest.mark.gpu, id="cuda")]
MODELS = ("zoo:llama-tiny", "zoo:qwen3-tiny", "zoo:gemma3-tiny")
LENGTHS = (3, 20, 1, 9, 33)
OPTIONS = {"max_batch_size": 3, "max_seq_len": 64, "prefill_chunk_size": 16, "draft_rows": 16}

Loaded = tuple[CausalLM, Tokenizer]


def load(name: str, device: str, dtype: torch.dtype) -> Loaded:
    checkpoint = open_checkpoint(name)
    model = load_model(checkpoint, device=torch.device(device), dtype=dtype, max_positions=64)
    return model, checkpoint.tokenizer()


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=DEVICES)
def exact(request: pytest.FixtureRequest, name: str) -> Loaded:
    """A model in float32."""
    return load(name, request.param, torch.float32)


def build(phase: str, loaded: Loaded, **options: Any) -> Engine:
    package = find_phase(phase)
    known = {key: value for key, value in (OPTIONS | options).items() if key in package.Config.model_fields}
    engine: Engine = package.build_engine(package.Config(**known), model=loaded[0], tokenizer=loaded[1])
    return engine


def orders(vocab_size: int, **values: Any) -> list[tuple[list[int], SamplingParams]]:
    draw = random.Random(3)
    return [
        (
            [draw.randrange(vocab_size) for _ in range(length)],
            SamplingParams(max_new_tokens=4 + length % 4, ignore_eos=True, seed=length, **values),
        )
        for length in LENGTHS
    ]


def serve(engine: Engine, given: list[tuple[list[int], SamplingParams]]) -> list[list[StepOutput]]:
    """Serve all requests together. Returns the outputs of each."""
    for number, (prompt, params) in enumerate(given):
        assert engine.add_request(engine.create_request(prompt, params, str(number)))
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
def test_every_phase_gives_the_tokens_of_one_request_alone(phase: str, exact: Loaded) -> None:
    given = orders(exact[0].config.vocab_size, temperature=0.0)
    alone = [list(generate(exact[0], Request("alone", prompt, params))) for prompt, params in given]
    assert tokens(serve(build(phase, exact), given)) == tokens(alone)


@pytest.mark.gpu
@pytest.mark.parametrize("phase", phase_names()[1:])
def test_bits_in_bfloat16_are_the_same_alone_and_beside_others(phase: str, name: str) -> None:
    """Log-probabilities are equal only if every logit of the row is."""
    loaded = load(name, "cuda", torch.bfloat16)
    given = orders(loaded[0].config.vocab_size, temperature=1.0, logprobs=5)
    crowd = serve(build(phase, loaded), given)
    engine = build(phase, loaded)
    alone = [serve(engine, [each])[0] for each in given]
    for together, single in zip(crowd, alone, strict=True):
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


@pytest.mark.parametrize("phase", phase_names()[1:])
@pytest.mark.parametrize("device", DEVICES)
def test_a_failed_pass_changes_no_token(phase: str, device: str) -> None:
    loaded = load(MODELS[0], device, torch.float32)
    given = orders(loaded[0].config.vocab_size, temperature=0.0)
    expected = tokens(serve(build(phase, loaded, captured_steps=False), given))
    engine = build(phase, loaded, captured_steps=False)
    runner: Any = engine.runner
    runner.model = FailsOnce(loaded[0])
    assert tokens(serve(engine, given)) == expected
    assert engine.telemetry.counters.failed_passes > 0
