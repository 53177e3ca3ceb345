"""Log-probabilities of a prompt's tokens: those of transformers, in every phase, however the prompt is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.engine.engine import Engine
from common.request import Request, SamplingParams, StepOutput
from common.startup.phases import find_phase, phase_names
from tests.support.engines import add, assert_all_free, run, tokens_of
from tests.support.models import oracle_logits, oracle_of, zoo

PROMPTS = [
    [(7 * i + j * j) % 500 + 3 for j in range(length)] for i, length in enumerate((150, 2, 33, 64, 65))
]


def engine_of(phase: str, model: str = "llama", **options: Any) -> Engine:
    package = find_phase(phase)
    if phase == "phase4_static":
        options["batch_wait_timeout_s"] = 0.0
    config = package.Config(
        model=f"zoo:{model}-tiny", device="cpu", dtype="float32", max_seq_len=256, max_batch_size=4, **options
    )
    engine: Engine = package.build_engine(config)
    return engine


def expected(model: str, prompt: list[int]) -> torch.Tensor:
    """Return transformers' log-probabilities for each token but the first, [T - 1, vocab]."""
    return oracle_logits(oracle_of(zoo(f"{model}-tiny")), prompt)[:-1].float().log_softmax(dim=-1)


def first_of(outputs: list[StepOutput], request: Request) -> StepOutput:
    return next(output for output in outputs if output.request_id == request.request_id)


def assert_scores(outputs: list[StepOutput], request: Request, model: str, top: int) -> None:
    found = first_of(outputs, request).prompt_logprobs
    assert found is not None
    reference = expected(model, request.prompt_token_ids)
    assert len(found) == len(reference)
    for token_id, each, row in zip(request.prompt_token_ids[1:], found, reference, strict=True):
        assert each.logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        above, within = (int((row > row[token_id] + by).sum()) for by in (1e-4, -1e-4))
        assert each.rank is not None
        assert above < each.rank <= within
        values, _ = row.topk(top)
        assert [value for _, value in each.top] == pytest.approx(values.tolist(), abs=1e-4)
        assert all(value == pytest.approx(row[token].item(), abs=1e-4) for token, value in each.top)


@pytest.mark.parametrize(
    ("phase", "model"),
    [
        *((phase, "llama") for phase in phase_names()),
        *(
            pytest.param(phase, model, marks=pytest.mark.slow)
            for phase in (phase_names()[0], phase_names()[-1])
            for model in ("qwen3", "gemma3")
        ),
    ],
)
def test_scores_equal_those_of_transformers_beside_other_requests(phase: str, model: str) -> None:
    """Some requests ask for log-probabilities. The others are served as usual, beside them."""
    engine = engine_of(phase, model, **({"prefill_chunk_size": 48} if int(phase[5]) >= 7 else {}))
    plain = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)
    requests = [
        add(engine, prompt, plain if i == 3 else asking(top=i % 3, tokens=6))
        for i, prompt in enumerate(PROMPTS)
    ]
    outputs = run(engine)
    for i, request in enumerate(requests):
        if i == 3:
            assert first_of(outputs, request).prompt_logprobs is None
        else:
            assert_scores(outputs, request, model, top=i % 3)
        told = [o for o in outputs if o.request_id == request.request_id and o.prompt_logprobs is not None]
        assert len(told) == (i != 3), "once, with the first token"
    again = add(engine, PROMPTS[0], plain)
    assert tokens_of(run(engine), again) == tokens_of(outputs, requests[0]), "to ask changes no token"
    assert_all_free(engine)


def asking(top: int, tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True, prompt_logprobs=top)


@pytest.mark.parametrize("phase", ["phase6_paged", "phase7_chunked", "phase8_prefix", "phase9_pipelined"])
def test_a_preempted_prompts_scores_are_reported_once(phase: str) -> None:
    engine = engine_of(phase, block_size=4, num_blocks=30)
    requests = [add(engine, PROMPTS[2], asking(top=1, tokens=30)) for _ in range(3)]
    outputs = run(engine)
    assert engine.scheduler.preemptions > 0
    for request in requests:
        assert_scores(outputs, request, "llama", top=1)
    assert_all_free(engine)


@pytest.mark.parametrize("phase", ["phase8_prefix", "phase9_pipelined"])
def test_a_prompt_with_scores_is_computed_despite_cached_blocks(phase: str) -> None:
    engine = engine_of(phase, block_size=4)
    add(engine, PROMPTS[0], SamplingParams(temperature=0.0, max_new_tokens=2))
    run(engine)
    request = add(engine, PROMPTS[0], asking(top=0, tokens=2))
    outputs = run(engine)
    assert first_of(outputs, request).cached_tokens == 0
    assert_scores(outputs, request, "llama", top=0)
    plain = add(engine, PROMPTS[0], SamplingParams(temperature=0.0, max_new_tokens=2))
    assert first_of(run(engine), plain).cached_tokens == 148, "others still find it"
