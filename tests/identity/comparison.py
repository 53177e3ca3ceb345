"""Compares the tokens and logits of an engine's answers with those of `generate()` for each request alone."""

from __future__ import annotations

import dataclasses
import functools
import random
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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
from common.models.loader import fill_randomly, keep_as_read
from common.models.registry import ARCHITECTURES, ZOO, load_model, open_checkpoint
from common.request import Request, SamplingParams
from common.sampling.draw import Sampled
from common.sampling.inputs import TokenMasks
from common.startup.phases import find_phase
from common.text.tokenizer import Tokenizer
from phase9_pipelined.runner import PipelinedRunner
from phase9_pipelined.state import LaunchedPass
from tests.support.engines import Variant
from tests.support.gguf_files import save_gguf
from tests.support.models import load, read_config
from tests.support.packed import Kind, quantize_folder

CPU = torch.device("cpu")
MAX_SEQ_LEN = 384
MAX_POSITIONS = 1600  # of the trained models


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
        engine.maker.grammars = self.grammars  # each grammar is tried once for all engines of a run
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
    fill_randomly(model, torch.device("cpu"), 1, keep_as_read)
    for name, parameter in model.named_parameters():
        if not name.endswith("norm.weight"):
            parameter.data.mul_(5.0)
    return model


def load_in_groups(folder: Path, dtype: torch.dtype) -> CausalLM:
    """Write a trained model to a GGUF file, and load it with the file's own bits."""
    kinds = {"token_embd": "Q8_0", "attn_v": "Q5_0"}
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "model.gguf"
        save_gguf(
            folder,
            file,
            lambda name: kinds.get(name.split(".")[-2], "Q4_1"),
            tokenizer=folder.name,
            vocab_size=read_config(folder)["vocab_size"],
        )
        return load(file, dtype=dtype, max_positions=MAX_POSITIONS, keep_groups=True)


def load_gptq(folder: Path, dtype: torch.dtype) -> CausalLM:
    """Quantize a trained model to four bits, with the inputs of its groups in another order, and load it."""
    with tempfile.TemporaryDirectory() as temporary:
        target = Path(temporary) / "quantized"
        quantize_folder(folder, target, "gptq", Kind(group=32, in_order=False))
        return load(target, dtype=dtype, max_positions=MAX_POSITIONS, keep_groups=True)


@functools.cache
def subject_of(name: str) -> Subject:
    """Return the model of a line of `MODELS`, packed as in a server."""
    kind, _, architecture = name.removesuffix("-tiny").partition(":")
    checkpoint = open_checkpoint(f"zoo:{architecture}-tiny")
    if kind == "random":
        model = random_model(architecture)
    else:
        dtype = torch.bfloat16 if "bf16" in kind else torch.float32
        if "gguf" in kind:
            model = load_in_groups(ZOO / f"{architecture}-tiny", dtype)
        elif "gptq" in kind:
            model = load_gptq(ZOO / f"{architecture}-tiny", dtype)
        else:
            model = load_model(checkpoint, device=CPU, dtype=dtype, max_positions=MAX_POSITIONS)
    if "int8" in kind:
        model.quantize()
    model.pack()
    model.measure_batch_invariance()
    return Subject(model, checkpoint.tokenizer())


# ---------------------------------------------------------------------- comparisons

LOGIT_BOUND = 1e-4  # × max(1, max |logit|)
NEAR_TIE = 1e-4  # a flip between logits this close is reported, not failed

Flip = tuple[tuple[int, ...], int]  # prompt and index of the token


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
            assert engine.add_request(engine.maker.create(arrival.prompt, arrival.params, str(index)))
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
    name: str, subject: Subject, arrival: Arrival, tokens: list[int], logits: list[Tensor], flips: set[Flip]
) -> None:
    """Assert that a request got the tokens and logits that it gets alone.

    If the model is not batch invariant here, logits may differ within a bound. A greedy token may differ at a near
    tie, once among the requests that share `flips`. A drawn token may differ if the request's own draw takes it
    from these logits, and the other from the logits alone. All later logits must be those that these tokens give.
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


def check(
    subject: Subject,
    variant: Variant,
    arrivals: Sequence[Arrival],
    prepare: Callable[[Engine], None] = lambda engine: None,
    **options: int,
) -> Engine:
    """Serve requests, and compare each with the request alone. Returns the engine, which `prepare` may change."""
    engine = subject.engine(variant, **options)
    prepare(engine)
    tokens = check_on(engine, subject, arrivals)
    if isinstance(engine.runner, PipelinedRunner):
        # Recording waits for each forward pass, so the requests run a second time without it.
        again = subject.engine(variant, **options)
        prepare(again)
        assert serve(again, arrivals) == tokens
    return engine


def check_on(engine: Engine, subject: Subject, arrivals: Sequence[Arrival]) -> dict[str, list[int]]:
    """Serve requests on an engine that may have served others, and compare each with the request alone."""
    with recorded_logits() as logits:
        tokens = serve(engine, arrivals)
    flips: set[Flip] = set()
    for name, got in tokens.items():
        assert_same(f"{engine.config} {name}", subject, arrivals[int(name)], got, logits[name], flips)
    return tokens


def prompt_of(subject: Subject, length: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(subject.model.config.vocab_size) for _ in range(length))


def greedy(tokens: int, *, ignore_eos: bool = True) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=ignore_eos)
