"""With native kernels a sequence's logits have the same bits alone and under load, in bfloat16, too."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet

from common.engine.engine import Engine
from common.engine.reference import generate
from common.models.layers import CausalLM
from common.models.registry import load_model, open_checkpoint
from common.request import Request, SamplingParams, StepOutput
from common.startup.phases import find_phase, phase_names

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MODELS = ("zoo:llama-tiny", "zoo:qwen3-tiny", "zoo:gemma3-tiny")
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in phase_names()),
    ("phase6_paged", {"block_size": 4, "num_blocks": 95}),  # memory runs out
    ("phase6_paged", {"kv_cache_backend": "contiguous"}),
    ("phase7_chunked", {"prefill_chunk_size": 7}),
    ("phase7_chunked", {"prefill_chunk_size": 100, "mixed_batches": False, "prefill_token_budget": None}),
    ("phase7_chunked", {"prefill_chunk_size": 33, "block_size": 1, "num_blocks": 800}),
    ("phase8_prefix", {"prefill_chunk_size": 33, "block_size": 4, "num_blocks": 95}),
    ("phase8_prefix", {"enable_prefix_caching": False}),
    ("phase9_pipelined", {"prefill_chunk_size": 33, "block_size": 4, "num_blocks": 85}),
    ("phase9_pipelined", {"prefill_mode": "drained", "prefill_chunk_size": 7}),
    *(("phase9_pipelined", {"pipeline_depth": depth}) for depth in (0, 1)),
    *(("phase10_speculative", {"draft_rows": 64, "draft_length": k}) for k in (1, 3, 7, 15)),
    ("phase10_speculative", {"draft_rows": 30, "prefill_chunk_size": 33, "block_size": 4, "num_blocks": 95}),
    ("phase10_speculative", {"draft_rows": 64, "pipeline_depth": 0}),
    ("phase10_speculative", {"draft_rows": 64, "draft_from_finished": True, "captured_steps": False}),
]


def bits(outputs: list[StepOutput]) -> list[tuple[int | None, Any]]:
    """Return tokens with their log-probabilities, which are equal only if all logits of the row are equal."""
    return [(output.token_id, output.logprobs) for output in outputs]


#: A few variants with very different batches.
FEW_VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("phase4_static", {}),
    ("phase7_chunked", {"prefill_chunk_size": 7}),
    ("phase9_pipelined", {"prefill_chunk_size": 33, "block_size": 4, "num_blocks": 85}),
    ("phase10_speculative", {"draft_rows": 64, "draft_length": 7}),
]

#: Llama in both types and with int8 weights, and Gemma in bfloat16. The others find the same errors.
QUICK = {
    ("zoo:llama-tiny", "float32", "none"),
    ("zoo:llama-tiny", "bfloat16", "none"),
    ("zoo:llama-tiny", "bfloat16", "int8"),
    ("zoo:gemma3-tiny", "bfloat16", "none"),
}
#: A model with windows, and one without.
IN_EVERY_VARIANT = {("zoo:llama-tiny", "bfloat16", "none"), ("zoo:gemma3-tiny", "bfloat16", "none")}


def case(kind: tuple[str, str, str], *more: Any) -> ParameterSet:
    """Return a test parameter: a model with its type and kind of weights, and the values in `more`."""
    named = [*(word for word in kind if word != "none"), *map(str, more)]
    return pytest.param(kind, *more, id="-".join(named), marks=[pytest.mark.slow] * (kind not in QUICK))


KINDS = [(name, dtype, weights) for name in MODELS for dtype in DTYPES for weights in ("none", "int8")]


@functools.cache
def load(name: str, dtype: str, weights: str) -> CausalLM:
    loaded = load_model(
        open_checkpoint(name), device=torch.device("cpu"), dtype=DTYPES[dtype], max_positions=1024
    )
    if weights == "int8":
        loaded.quantize()
    loaded.pack()
    loaded.measure_batch_invariance()
    return loaded


@functools.cache
def requests_of(model: CausalLM) -> list[tuple[list[int], SamplingParams]]:
    draw = random.Random(5)
    lengths = [1, 2, 31, 63, 64, 65, 130, 255, 256, 257, 300, 12, 90, 5]
    return [
        (
            [draw.randrange(model.config.vocab_size) for _ in range(length)],
            SamplingParams(
                temperature=draw.choice([0.0, 1.0]),
                seed=number,
                logprobs=5,
                ignore_eos=True,
                max_new_tokens=draw.randint(5, 30),
            ),
        )
        for number, length in enumerate(lengths)
    ]


@functools.cache
def answers_of(model: CausalLM) -> list[Any]:
    return [bits(list(generate(model, Request("solo", *request)))) for request in requests_of(model)]


@pytest.fixture(params=[case(kind) for kind in KINDS])
def model(request: pytest.FixtureRequest) -> CausalLM:
    loaded = load(*request.param)
    if not loaded.batch_invariant:
        dtype = request.param[1]
        pytest.skip(f"{dtype} is not batch invariant here: test_token_identity.py holds logits to a bound")
    return loaded


@pytest.fixture
def requests(model: CausalLM) -> list[tuple[list[int], SamplingParams]]:
    return requests_of(model)


@pytest.fixture
def alone(model: CausalLM) -> list[Any]:
    return answers_of(model)


def engine_of(model: CausalLM, phase: str, options: dict[str, Any]) -> Engine:
    package = find_phase(phase)
    config = package.Config(max_batch_size=6, max_seq_len=400, **options)
    tokenizer = open_checkpoint("zoo:llama-tiny").tokenizer()
    engine: Engine = package.build_engine(config, model=model, tokenizer=tokenizer)
    return engine


def serve(engine: Engine, requests: Any, shuffle: str = "") -> list[Any]:
    """Serve requests that arrive two a step, in an order drawn by `shuffle`. Returns the bits of each."""
    order = list(range(len(requests)))
    random.Random(shuffle).shuffle(order)
    found: dict[str, list[StepOutput]] = {}
    while order or engine.has_work:
        for number in order[:2]:
            prompt, params = requests[number]
            engine.add_request(Request(str(number), prompt, params))
        del order[:2]
        for output in engine.step():
            assert output.error is None
            found.setdefault(output.request_id, []).append(output)
    return [bits(found[str(number)]) for number in range(len(requests))]


@pytest.mark.parametrize(
    ("model", "phase", "options"),
    [
        case(kind, *each)
        for kind in KINDS
        for each in (VARIANTS if kind in IN_EVERY_VARIANT else FEW_VARIANTS)
    ],
    indirect=["model"],
)
def test_a_sequence_has_the_same_bits_alone_and_under_load(
    phase: str, options: dict[str, Any], model: CausalLM, requests: Any, alone: list[Any]
) -> None:
    engine = engine_of(model, phase, options)
    assert serve(engine, requests, phase + str(options)) == alone
    if options.get("num_blocks") == 95:
        assert engine.telemetry.counters.preemptions > 0


@pytest.mark.parametrize("model", [case(kind) for kind in sorted(QUICK)], indirect=True)
def test_and_with_another_number_of_threads(model: CausalLM, requests: Any, alone: list[Any]) -> None:
    before = torch.get_num_threads()
    assert before == 1
    try:
        torch.set_num_threads(2)
        found = serve(engine_of(model, "phase7_chunked", {"prefill_chunk_size": 40}), requests[:6])
    finally:
        torch.set_num_threads(before)
    assert found == alone[:6]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 1, "prefill_chunk_size": 512, "prefill_token_budget": None},
        {"block_size": 4, "num_blocks": 300, "prefill_chunk_size": 7},  # too few blocks to cache everything
    ],
    ids=str,
)
def test_what_is_found_has_the_bits_of_what_is_computed(
    options: dict[str, Any], model: CausalLM, requests: Any, alone: list[Any]
) -> None:
    """The same requests come again, and then second turns that begin with the first prompts and answers."""
    engine = engine_of(model, "phase8_prefix", options)
    assert serve(engine, requests) == alone
    turns = [
        ([*prompt, *(token for token, _ in told if token is not None), 7, 8, 9], params)
        for (prompt, params), told in zip(requests, alone, strict=True)
    ]
    expected = [bits(list(generate(model, Request("solo", *turn)))) for turn in turns]
    assert serve(engine, [*requests, *turns]) == [*alone, *expected]
    counters = engine.telemetry.counters
    assert counters.cached_tokens > (200 if "num_blocks" in options else 2000)
    assert (counters.evictions > 0) == ("num_blocks" in options)
