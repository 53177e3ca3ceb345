"""What the token identity suite compares, and against what."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import common.generate
import common.runner
from common.engine import Engine
from common.generate import generate
from common.grammar import GrammarCompiler
from common.models.config import Llama3Scaling, ModelConfig, RopeConfig
from common.models.layers import CausalLM
from common.models.loader import fill_randomly
from common.models.registry import ARCHITECTURES, load_model, open_checkpoint
from common.phases import find_phase, phase_names
from common.request import Request, SamplingParams
from common.sampling import Sampled, TokenMasks
from common.streams import Done, Pending
from common.text import Tokenizer
from phase9_pipelined.runner import PipelinedRunner
from phase9_pipelined.slots import LaunchedPass

MAX_SEQ_LEN = 384


@dataclass(frozen=True)
class Variant:
    """A phase with some options: one line here, and the whole suite holds for it."""

    phase: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.phase, *(str(value) for value in self.options.values())])


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
]
VARIANTS += [Variant(name) for name in phase_names() if name not in {variant.phase for variant in VARIANTS}]

MODELS = [
    "zoo:llama-tiny",
    "zoo:qwen3-tiny",
    "zoo:gemma3-tiny",
    "random:llama",
    pytest.param("random:qwen3", marks=pytest.mark.slow),
    pytest.param("random:gemma3", marks=pytest.mark.slow),
]


#: The first of each phase.
PLAIN = list({variant.phase: variant for variant in reversed(VARIANTS)}.values())


def is_quick(model: str, variant: Variant) -> bool:
    """Gemma has most of what can go wrong (windows, two thetas), and random weights hide nothing."""
    if "gemma3" in model:
        return True
    return variant in (PLAIN if "random" in model else (PLAIN[0], PLAIN[-1]))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is not quick of the grid of models and variants as slow, for there is much of it."""
    for item in items:
        if isinstance(item, pytest.Function) and {"subject", "variant"} <= set(item.fixturenames):
            chosen = item.callspec.params
            if not is_quick(chosen["subject"], chosen["variant"]):
                item.add_marker(pytest.mark.slow)


@pytest.fixture(params=VARIANTS, ids=str)
def variant(request: pytest.FixtureRequest) -> Variant:
    chosen: Variant = request.param
    return chosen


@dataclass
class Subject:
    """A model, its tokenizer, and what each prompt gives when it runs alone."""

    model: CausalLM
    tokenizer: Tokenizer
    _alone: dict[tuple[tuple[int, ...], SamplingParams], Solo] = field(default_factory=dict)

    @functools.cached_property
    def grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer, self.model.config.eos_token_ids)

    def engine(self, variant: Variant, **options: Any) -> Engine:
        package = find_phase(variant.phase)
        config = package.Config(**{"max_seq_len": MAX_SEQ_LEN, **variant.options, **options})
        return package.build_engine(config, model=self.model, tokenizer=self.tokenizer)

    def alone(self, prompt: Sequence[int], params: SamplingParams) -> Solo:
        """Tokens and logits of the request run by `generate()`."""
        key = (tuple(prompt), params)
        if key not in self._alone:
            matcher = None if params.grammar is None else self.grammars.new_matcher(params.grammar)
            eos = self.model.config.eos_token_ids
            request = Request("alone", list(prompt), params, eos, matcher=matcher)
            with recorded_logits() as logits:
                for _ in generate(self.model, request):
                    pass
            tokens = request.token_ids[len(prompt) :]
            self._alone[key] = Solo(
                tokens, logits["alone"], self.model.batch_invariant, params.temperature > 0
            )
        return self._alone[key]


@dataclass
class Solo:
    tokens: list[int]
    logits: list[Tensor]  # [vocab] for each token
    exact: bool  # whether others' must have the same bits, or lie within a bound
    drawn: bool  # a draw may fall beside another edge, however far apart the two logits are


def as_served(model: CausalLM, tokenizer: Tokenizer) -> Subject:
    """A subject that computes what a server computes; a warning where only bounds can be held."""
    model.pack()
    model.measure_batch_invariance()
    if not model.batch_invariant:
        warnings.warn(
            "not batch invariant here: logits are compared within bounds, not bit for bit", stacklevel=2
        )
    return Subject(model, tokenizer)


class recorded_logits:
    """While entered: the logits that every request's tokens were sampled from, by request id."""

    def __enter__(self) -> dict[str, list[Tensor]]:
        self._patch = pytest.MonkeyPatch()
        seen: dict[str, list[Tensor]] = defaultdict(list)
        original = common.runner.sample

        def sample(logits: Tensor, requests: Sequence[Request], masks: TokenMasks | None) -> Sampled:
            for row, request in enumerate(requests):
                seen[request.request_id].append(logits[row].clone())
            return original(logits, requests, masks)

        handed_in = PipelinedRunner._sample_one

        def sample_one(runner: PipelinedRunner, launched: LaunchedPass) -> Pending:
            outputs = launched.forward.wait()
            for row, request in enumerate(launched.requests):
                seen[request.request_id].append(outputs[0][row].clone())
            launched.forward = Done(outputs)
            return handed_in(runner, launched)

        self._patch.setattr(common.runner, "sample", sample)
        self._patch.setattr(common.generate, "sample", sample)
        self._patch.setattr(PipelinedRunner, "_sample_one", sample_one)
        return seen

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


def random_model(architecture: str) -> CausalLM:
    """Random weights, large enough that logits are not flat: confident predictions hide mask errors."""
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


@pytest.fixture(scope="session", params=MODELS)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    name: str = request.param
    architecture = name.split(":")[1].removesuffix("-tiny")
    checkpoint = open_checkpoint(f"zoo:{architecture}-tiny")
    if name.startswith("random:"):
        model = random_model(architecture)
    else:
        model = load_model(
            checkpoint, device=torch.device("cpu"), dtype=torch.float32, max_positions=MAX_SEQ_LEN
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield as_served(model, checkpoint.tokenizer())
    torch.set_num_threads(threads)
