"""The token identity suite's parts: models, variants of phases, and the answers that `generate` gives alone."""

from __future__ import annotations

import dataclasses
import functools
import random
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import common.engine.reference
import common.engine.runner
from common.constrained.allowed_tokens import AllowedTokens
from common.constrained.grammar import GrammarCompiler
from common.devices.streams import Done, Pending
from common.engine.engine import Engine
from common.engine.reference import generate
from common.models.config import Llama3Scaling, ModelConfig, RopeConfig
from common.models.layers import CausalLM
from common.models.loader import fill_randomly
from common.models.registry import ARCHITECTURES, load_model, open_checkpoint
from common.request import Request, SamplingParams
from common.sampling.draw import Sampled
from common.sampling.inputs import TokenMasks
from common.startup.phases import find_phase, phase_names
from common.text.tokenizer import Tokenizer
from phase9_pipelined.runner import PipelinedRunner
from phase9_pipelined.state import LaunchedPass
from tests.support.engines import Variant

MAX_SEQ_LEN = 384
MAX_POSITIONS = 1600  # of the trained models


VARIANTS = [
    Variant("phase4_static", {"batch_wait_timeout_s": 0.0}),
    Variant("phase5_continuous"),
    Variant("phase5_continuous", {"max_prefill_pass_tokens": 40}),
    Variant("phase6_paged"),
    Variant("phase6_paged", {"kv_cache_backend": "contiguous"}),
    Variant("phase6_paged", {"block_size": 1}),
    Variant("phase6_paged", {"block_size": 64, "num_blocks": 12}),
    Variant("phase7_chunked", {"prefill_chunk_size": 16}),
    Variant(
        "phase7_chunked",
        {
            "prefill_chunk_size": 7,
            "prefill_token_budget": None,
            "block_size": 4,
            "max_prefill_pass_tokens": 16,
        },
    ),
    Variant(
        "phase7_chunked",
        {"prefill_chunk_size": 1, "prefill_token_budget": None, "max_prefill_chunks_per_step": 3},
    ),
    Variant("phase7_chunked", {"mixed_batches": False, "prefill_chunk_size": 16, "num_blocks": 48}),
    Variant("phase7_chunked", {"kv_cache_backend": "contiguous", "prefill_chunk_size": 7}),
    Variant("phase7_chunked", {"use_chunked_prefill": False}),
    Variant("phase8_prefix", {"prefill_chunk_size": 16}),
    Variant("phase8_prefix", {"block_size": 1, "prefill_chunk_size": 7, "prefill_token_budget": None}),
    Variant("phase8_prefix", {"block_size": 4, "num_blocks": 150, "mixed_batches": False}),
    Variant("phase8_prefix", {"use_chunked_prefill": False, "block_size": 4}),
    Variant("phase8_prefix", {"enable_prefix_caching": False}),
    Variant("phase9_pipelined", {"prefill_chunk_size": 16}),
    Variant("phase9_pipelined", {"pipeline_depth": 1, "block_size": 4, "num_blocks": 150}),
    Variant("phase9_pipelined", {"pipeline_depth": 0, "mixed_batches": False, "prefill_chunk_size": 7}),
    Variant("phase9_pipelined", {"prefill_mode": "drained", "captured_steps": False}),
    Variant("phase9_pipelined", {"use_chunked_prefill": False, "enable_prefix_caching": False}),
    Variant("phase10_speculative", {"draft_rows": 64, "draft_length": 15, "block_size": 4}),
    Variant("phase10_speculative", {"draft_rows": 12, "draft_length": 1, "prefill_chunk_size": 16}),
    Variant(
        "phase10_speculative", {"draft_rows": 40, "draft_length": 3, "pipeline_depth": 1, "num_blocks": 30}
    ),
    Variant("phase10_speculative", {"draft_rows": 64, "pipeline_depth": 0, "mixed_batches": False}),
    Variant("phase10_speculative", {"draft_rows": 64, "draft_from_finished": True, "captured_steps": False}),
    Variant("phase10_speculative"),
]
VARIANTS += [Variant(name) for name in phase_names() if name not in {variant.phase for variant in VARIANTS}]

MODELS = (
    "zoo:llama-tiny",
    "zoo:qwen3-tiny",
    "zoo:gemma3-tiny",
    "random:llama",
    "random:qwen3",
    "random:gemma3",
    "int8:gemma3-tiny",
)
#: Models that run in every variant. Gemma has the most features that can go wrong (windows, two thetas), and with
#: random weights small errors show.
IN_EVERY_VARIANT = ("zoo:gemma3-tiny", "random:gemma3")
RARE = ("random:qwen3", "random:gemma3")  # slow in every variant

#: The first variant of each phase.
PLAIN = list({variant.phase: variant for variant in reversed(VARIANTS)}.values())

#: For requests that may not draw every token: a mask must reach its row in each phase, and where steps overlap or
#: guesses are verified. It does not depend on blocks and chunks.
MASKED = [*PLAIN, *(v for v in VARIANTS if hasattr(v.config(), "pipeline_depth") and v not in PLAIN)]


def is_quick(model: str, variant: Variant) -> bool:
    plain = PLAIN if model.startswith("random:") else (PLAIN[0], PLAIN[-1])
    return model in IN_EVERY_VARIANT or variant in plain


def _combinations(models: Sequence[str], variants: Sequence[Variant]) -> list[tuple[str, Variant]]:
    return [(m, v) for m in models for v in variants if m in IN_EVERY_VARIANT or v in PLAIN]


def pairs(
    models: Sequence[str] = MODELS,
    variants: Sequence[Variant] = VARIANTS,
    *,
    often: Sequence[Variant] = VARIANTS,
    rare: Sequence[str] = RARE,
) -> pytest.MarkDecorator:
    """Run a test on Gemma in every variant, and on the other models in the first variant of each phase.

    A variant decides which rows are computed together and where their keys lie. The other models differ in norms
    and weights, which do not depend on that.

    Args:
        often: the variants that the ordinary suite runs.
        rare: the models that it leaves out.
    """

    def marks(model: str, variant: Variant) -> list[pytest.MarkDecorator]:
        quick = is_quick(model, variant) and model not in rare and variant in often
        return [] if quick else [pytest.mark.slow]

    return pytest.mark.parametrize(
        ("subject", "variant"),
        [pytest.param(m, v, id=f"{m}-{v}", marks=marks(m, v)) for m, v in _combinations(models, variants)],
        indirect=["subject"],
    )


def per_model() -> pytest.MarkDecorator:
    """Run a test once for each model, with a list of the variants that `pairs` runs one by one.

    Then the oracle computes a drawn request once for all variants. Variants that are slow in `pairs` make a second
    case.
    """
    cases = []
    for model in MODELS:
        for slow in (False, True):
            variants = [
                variant
                for _, variant in _combinations([model], VARIANTS)
                if slow != (is_quick(model, variant) and model not in RARE)
            ]
            if variants:
                name = f"{model}-{len(variants)}-variants"
                marks = [pytest.mark.slow] * slow
                cases.append(pytest.param(model, variants, id=name, marks=marks))
    return pytest.mark.parametrize(("subject", "variants"), cases, indirect=["subject"])


@dataclass
class Subject:
    """A model, its tokenizer, and the tokens and logits that each request gets alone."""

    model: CausalLM
    tokenizer: Tokenizer
    _alone: dict[tuple[tuple[int, ...], SamplingParams], Solo] = field(default_factory=dict)

    @functools.cached_property
    def grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer, self.model.config.eos_token_ids)

    def engine(self, variant: Variant, **options: Any) -> Engine:
        config = variant.config(**({"max_seq_len": MAX_SEQ_LEN} | options))
        engine: Engine = find_phase(variant.phase).build_engine(
            config, model=self.model, tokenizer=self.tokenizer
        )
        engine.grammars = self.grammars  # each grammar is tried once for all engines of a run
        return engine

    def alone(self, prompt: Sequence[int], params: SamplingParams) -> Solo:
        """Return the tokens and logits that `generate()` gives for a request."""
        key = (tuple(prompt), params)
        if key not in self._alone:
            self._alone[key] = self._generate(prompt, params, sampled_from=())
        return self._alone[key]

    def along(self, prompt: Sequence[int], params: SamplingParams, sampled_from: Sequence[Tensor]) -> Solo:
        """Run the request by `generate()`, but sample its tokens from given logits, [vocab] for each token.

        The logits of the result are those that `generate()` computes for these tokens.
        """
        return self._generate(prompt, params, sampled_from)

    def _generate(
        self, prompt: Sequence[int], params: SamplingParams, sampled_from: Sequence[Tensor]
    ) -> Solo:
        matcher = None if params.grammar is None else self.grammars.new_matcher(params.grammar)
        allowed = AllowedTokens.of(self.tokenizer, params.allowed_token_ids, params.bad_words)
        eos_token_ids = self.model.config.eos_token_ids
        request = Request("alone", list(prompt), params, eos_token_ids, matcher=matcher, allowed=allowed)
        with recorded_logits({"alone": sampled_from}) as logits:
            for _ in generate(self.model, request):
                pass
        return Solo(request.token_ids[len(prompt) :], logits["alone"])


@dataclass
class Solo:
    tokens: list[int]
    logits: list[Tensor]  # [vocab] for each token


def as_served(model: CausalLM, tokenizer: Tokenizer) -> Subject:
    """Return a subject whose model is packed as in a server. Warns if only bounds can be checked."""
    model.pack()
    model.measure_batch_invariance()
    if not model.batch_invariant:
        warnings.warn(
            "not batch invariant here: logits are compared within bounds, not bit for bit", stacklevel=2
        )
    return Subject(model, tokenizer)


class recorded_logits:
    """Context manager: record the logits computed for every request's tokens, by request id.

    Args:
        replaced: by request id, logits from which its first tokens are sampled instead.
    """

    def __init__(self, replaced: Mapping[str, Sequence[Tensor]] | None = None) -> None:
        self._replaced = replaced or {}

    def __enter__(self) -> dict[str, list[Tensor]]:
        self._patch = pytest.MonkeyPatch()
        seen: dict[str, list[Tensor]] = defaultdict(list)
        original = common.engine.runner.sample

        def see(row: int, requests: Sequence[Request], logits: Tensor) -> int:
            """Record a row at the index of its token. It replaces rows that followed wrong guesses."""
            request = requests[row]
            index = request.num_generated_tokens + request.pending_tokens + requests[:row].count(request)
            seen[request.request_id][index:] = [logits[row].clone()]
            return index

        def sample(logits: Tensor, requests: Sequence[Request], masks: TokenMasks | None) -> Sampled:
            rows = list(logits)
            for row, request in enumerate(requests):
                index = see(row, requests, logits)
                others = self._replaced.get(request.request_id, ())
                if len(others) > index:
                    rows[row] = others[index]
            return original(torch.stack(rows), requests, masks)

        handed_in = PipelinedRunner._sample_one

        def sample_one(runner: PipelinedRunner, launched: LaunchedPass) -> Pending:
            outputs = launched.work.wait()
            for row in range(len(launched.requests)):
                see(row, launched.requests, outputs[0])
            launched.work = Done(outputs)
            return handed_in(runner, launched)

        self._patch.setattr(common.engine.runner, "sample", sample)
        self._patch.setattr(common.engine.reference, "sample", sample)
        self._patch.setattr(PipelinedRunner, "_sample_one", sample_one)
        return seen

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


def random_model(architecture: str) -> CausalLM:
    """Return a model with random weights, large enough that the logits are not flat."""
    trained = open_checkpoint(f"zoo:{architecture}-tiny").config
    layers = trained.layers
    if architecture == "llama":
        scaled = RopeConfig(10_000.0, Llama3Scaling(4.0, 1.0, 4.0, 64))
        layers = tuple(dataclasses.replace(layer, rope=scaled) for layer in layers)
    config: ModelConfig = dataclasses.replace(trained, layers=layers, dtype=torch.float32)
    with torch.device("meta"):
        model = ARCHITECTURES[config.architecture](config, torch.float32, MAX_SEQ_LEN)
    fill_randomly(model, torch.device("cpu"), seed=1)
    for name, parameter in model.named_parameters():
        if not name.endswith("norm.weight"):
            parameter.data.mul_(5.0)
    return model


@functools.cache
def subject_of(name: str) -> Subject:
    """Return the model `zoo:…` with its trained weights, `int8:…` with these weights quantized, or `random:…` with
    random weights."""
    kind, _, architecture = name.removesuffix("-tiny").partition(":")
    checkpoint = open_checkpoint(f"zoo:{architecture}-tiny")
    if kind == "random":
        model = random_model(architecture)
    else:
        model = load_model(
            checkpoint, device=torch.device("cpu"), dtype=torch.float32, max_positions=MAX_POSITIONS
        )
    if kind == "int8":
        model.quantize()
    return as_served(model, checkpoint.tokenizer())


# ---------------------------------------------------------------------- comparisons

LOGIT_BOUND = 1e-4  # × max(1, max |logit|)
NEAR_TIE = 1e-4  # a flip between logits this close is reported, not failed
flips: set[tuple[tuple[int, ...], int]] = set()  # prompt and index of the token


@dataclass(frozen=True)
class Arrival:
    """A request, and the step before which it arrives."""

    step: int
    prompt: tuple[int, ...]
    params: SamplingParams


def serve(engine: Engine, arrivals: Sequence[Arrival]) -> dict[str, list[int]]:
    """Run all arrivals to their ends. Returns the generated tokens by request id, which is the index."""
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(arrivals))}
    ends: list[str] = []
    todo = sorted(enumerate(arrivals), key=lambda item: item[1].step)
    step = 0
    while todo or engine.has_work:
        while todo and todo[0][1].step <= step:
            index, arrival = todo.pop(0)
            assert engine.add_request(engine.create_request(arrival.prompt, arrival.params, str(index)))
        for output in engine.step():
            assert output.error is None, output
            assert output.token_id is not None
            tokens[output.request_id].append(output.token_id)
            ends += [output.request_id] * output.finished
        step += 1
        assert step < 5000, "the engine makes no progress"
    assert sorted(ends) == sorted(tokens), "each request ends exactly once"
    assert engine.runner.pool.used_tokens == 0
    assert engine.telemetry.counters.reclaimed_slots == 0
    return tokens


def assert_same(
    name: str, subject: Subject, arrival: Arrival, tokens: list[int], logits: list[Tensor]
) -> None:
    """Assert that a request got the tokens and logits that it gets alone.

    If the model is not batch invariant here, logits may differ within a bound. A greedy token may differ at a near
    tie, once a run. A drawn token may differ if the request's own draw takes it from these logits, and the other
    from the logits alone. All later logits must be the ones that these tokens give.
    """
    alone = subject.alone(arrival.prompt, arrival.params)
    logits = logits[: len(tokens)]  # one more may have been computed before the end was known
    if subject.model.batch_invariant:
        assert tokens == alone.tokens, name
        assert torch.equal(torch.stack(logits), torch.stack(alone.logits)), name
        return
    for i, (token, expected) in enumerate(zip(tokens, alone.tokens, strict=False)):
        if token != expected:
            first, second = alone.logits[i][expected].item(), alone.logits[i][token].item()
            assert not arrival.params.greedy or abs(first - second) < NEAR_TIE, (
                f"{name}: token {i} is {token}"
            )
            warnings.warn(f"a near tie flipped: {name}: token {i}", stacklevel=1)
            if arrival.params.greedy:
                flips.add((arrival.prompt, i))
                assert len(flips) <= 1, flips
            alone = subject.along(arrival.prompt, arrival.params, logits)
            break
    assert tokens == alone.tokens, name
    for i, (got, expected_logits) in enumerate(zip(logits, alone.logits, strict=True)):
        scale = max(1.0, expected_logits.abs().max().item())
        difference = (got - expected_logits).abs().max().item()
        assert difference < LOGIT_BOUND * scale, f"{name}: logits of token {i} differ by {difference}"


def check(subject: Subject, variant: Variant, arrivals: Sequence[Arrival], **options: int) -> Engine:
    engine = subject.engine(variant, **options)
    with recorded_logits() as logits:
        tokens = serve(engine, arrivals)
    if isinstance(engine.runner, PipelinedRunner):
        # Recording waits for each forward pass, so the requests run a second time without it.
        assert serve(subject.engine(variant, **options), arrivals) == tokens
    for name, got in tokens.items():
        assert_same(name, subject, arrivals[int(name)], got, logits[name])
    return engine


def prompt_of(subject: Subject, length: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(subject.model.config.vocab_size) for _ in range(length))


def greedy(tokens: int, *, ignore_eos: bool = True) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=ignore_eos)
