"""Engines for tests: with a clock that the test sets, a tokenizer of single bytes, and a model without weights."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from common.constrained.grammar import GrammarCompiler
from common.engine.engine import Engine
from common.engine.reference import generate
from common.hosting.async_engine import AsyncEngine, RequestStream
from common.hosting.local import LocalEngine
from common.kv import KVPool, KVShape, KVView
from common.llm import LLM
from common.models.config import LayerConfig, ModelConfig, RopeConfig
from common.models.layers import CausalLM, TokenBatch
from common.models.llama import Llama
from common.request import Request, SamplingParams, StepOutput
from common.server.api.answer import arriving
from common.startup.phases import find_phase
from common.text.tokenizer import Tokenizer
from tests.support.pools import CPU, SMALLEST, assert_consistent

EOS = 256
VOCAB = 300  # ids above EOS are the model's alone
ALLERGEN = 299  # a pass with this token raises (`Allergic`), or computes NaN (`nan_model`)
GREEDY = SamplingParams(temperature=0.0)


class Clock:
    """A clock that stands still until a test advances it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def byte_alphabet() -> list[str]:
    """Return the character with which byte-level tokenizers write each byte: its own, or one from U+0100 on."""
    letters = set(pre_tokenizers.ByteLevel.alphabet())
    others = iter(sorted(letters - set(map(chr, range(256)))))
    return [chr(byte) if chr(byte) in letters else next(others) for byte in range(256)]


def byte_tokenizer(merged: Sequence[bytes] = ()) -> Tokenizer:
    """Return a tokenizer whose ids are bytes, then `<eos>` (256), then the texts in `merged` (only decoded)."""
    letters = byte_alphabet()
    vocab = {letter: byte for byte, letter in enumerate(letters)}
    vocab["<eos>"] = EOS
    for offset, piece in enumerate(merged):
        vocab["".join(letters[byte] for byte in piece)] = EOS + 1 + offset
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("<eos>", normalized=False, special=True)])
    return Tokenizer(backend, vocab_size=VOCAB)


def model_config(**changes: Any) -> ModelConfig:
    layer = LayerConfig(window=None, rope=RopeConfig(10_000.0))
    config = ModelConfig(
        architecture="llama",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        layers=(layer, layer),
        rms_norm_eps=1e-5,
        max_position_embeddings=1024,
        activation="silu",
        qkv_bias=False,
        o_bias=False,
        qk_norm=False,
        norm_offset=0.0,
        mlp_bias=False,
        tie_word_embeddings=False,
        attention_scale=0.25,
        dtype=torch.float32,
        eos_token_ids=frozenset({EOS}),
    )
    return dataclasses.replace(config, **changes)


def tiny_model(seed: int = 0, **changes: Any) -> CausalLM:
    """A small Llama with random weights under which every token of the prompt matters."""
    config = model_config(**changes)
    model = Llama(config, torch.float32, config.max_position_embeddings)
    model.materialise(CPU)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = (
            1 + 0.3 * noise if name.endswith("norm.weight") else noise / parameter.shape[-1] ** 0.5
        )
    return model.eval()


def nan_model() -> CausalLM:
    """A small Llama whose keys and values are NaN at every `ALLERGEN`."""
    model = tiny_model()
    model.embed_tokens.weight.data[ALLERGEN] = math.nan
    return model


# ---------------------------------------------------------------------- a model without weights


def chained(token_ids: Sequence[int]) -> int:
    """Return the next token after a text, which depends on all tokens and their order. It is never `<eos>`."""
    return (sum((i + 1) * (t + 1) for i, t in enumerate(token_ids)) * 31 + 7) % 251


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """Return the `count` tokens with which `chained` continues a prompt."""
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(chained(token_ids))
    return token_ids[len(prompt) :]


def one_hot(token_id: int, height: float = 20.0) -> Tensor:
    logits = torch.zeros(VOCAB)
    logits[token_id] = height
    return logits


@dataclass
class Call:
    """One pass as the model saw it."""

    query_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    tokens: int
    logit_rows: list[int]


@dataclass
class RememberingModel:
    """A model without weights: writes token ids into the KV pool, reads each sequence back, and applies a rule.

    A wrong address, a shared slot or a stale column changes the sequence that it reads, and so the tokens. The rule
    gets the prompt and the generated tokens up to the sampled row, and returns the next token or its logits.
    """

    rule: Callable[[list[int]], int | Tensor] = chained
    pool: KVPool | None = None
    calls: list[Call] = field(default_factory=list)
    before_pass: Callable[[list[list[int]]], None] = lambda sequences: None
    config: ModelConfig = field(
        default_factory=lambda: model_config(
            num_kv_heads=1, head_dim=1, layers=(LayerConfig(None, RopeConfig(10_000.0)),)
        )
    )
    dtype = weight_dtype = torch.float32
    device = CPU
    max_positions = 1024
    is_packed = batch_invariant = False

    def __call__(self, batch: TokenBatch, view: KVView) -> Tensor:
        layout = view.layout
        self.calls.append(
            Call(layout.query_lengths, layout.kv_lengths, len(batch.token_ids), batch.logit_rows.tolist())
        )
        store = view._pool.k[0].view(-1)
        store[view.layout.write_addresses] = batch.token_ids.float() + 1  # 0 marks an unwritten column
        held = (store.int() - 1).tolist()
        size, tables = layout.block_size, layout.block_table.tolist()
        sequences = [
            [held[table[column // size] * size + column % size] for column in range(end)]
            for table, end in zip(tables, layout.kv_lengths, strict=False)
        ]
        owner = [s for s, count in enumerate(layout.query_lengths) for _ in range(count)]
        seen = [sequences[owner[row]][: int(batch.positions[row]) + 1] for row in batch.logit_rows.tolist()]
        self.before_pass(seen)
        rows = [self.rule(token_ids) for token_ids in seen]
        return torch.stack([one_hot(row) if isinstance(row, int) else row for row in rows])


class Allergic(RememberingModel):
    """Raises if a pass has the token `ALLERGEN`."""

    def __call__(self, batch: TokenBatch, view: KVView) -> Tensor:
        if (batch.token_ids == ALLERGEN).any():
            raise RuntimeError("allergic")
        return super().__call__(batch, view)


# ---------------------------------------------------------------------- engines


def build(
    phase: str, model: Any = None, *, clock: Callable[[], float] | None = None, **options: Any
) -> Engine:
    """Build the engine of a phase, given by its name or a part of it, with `model` or a `RememberingModel`."""
    package = find_phase(phase)
    model = model if model is not None else RememberingModel()
    defaults: dict[str, Any] = {"max_seq_len": 64, "max_batch_size": 4}
    if "batch_wait_timeout_s" in package.Config.model_fields:
        defaults["batch_wait_timeout_s"] = 0.0
    engine = package.build_engine(
        package.Config(**(defaults | options)),
        model=model,
        tokenizer=byte_tokenizer(),
        clock=clock if clock is not None else Clock(),
    )
    if isinstance(model, RememberingModel):
        model.pool = engine.runner.pool
    return engine


@functools.cache
def _grammars() -> GrammarCompiler:
    return build("static").maker.grammars


def build_constrained(phase: str, model: Any = None, **options: Any) -> Engine:
    """Build an engine as `build` does. All these engines have one compiler, which tries each grammar once."""
    engine = build(phase, model, **options)
    engine.maker.grammars = _grammars()
    return engine


def add(
    engine: Engine,
    prompt: str | Sequence[int],
    params: SamplingParams = GREEDY,
    request_id: str | None = None,
) -> Request:
    """Queue a request. Of a text, each byte is a token."""
    request = engine.maker.create(prompt, params, request_id)
    assert engine.add_request(request)
    return request


def greedy(max_new_tokens: int, **values: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens, **values)


def run(engine: Engine, limit: int = 2000) -> list[StepOutput]:
    """Step until the engine has no work. Returns all outputs in order."""
    outputs: list[StepOutput] = []
    for _ in range(limit):
        if not engine.has_work:
            return outputs
        outputs += engine.step()
    raise AssertionError("the engine makes no progress")


def tokens_of(outputs: Sequence[StepOutput], request: Request | None = None) -> list[int]:
    """Return the tokens of a request, or of all."""
    own = [o for o in outputs if request is None or o.request_id == request.request_id]
    return [o.token_id for o in own if o.token_id is not None]


def text_of(outputs: Sequence[StepOutput], request: Request) -> str:
    return "".join(o.text_delta for o in outputs if o.request_id == request.request_id)


def end_of(outputs: Sequence[StepOutput], request: Request) -> StepOutput:
    """Return the request's last output, which must be its only terminal one."""
    own = [o for o in outputs if o.request_id == request.request_id]
    assert [o.finished for o in own].count(True) == 1
    assert own[-1].finished
    return own[-1]


def solo(model: CausalLM, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """Return the tokens that `generate()` gives for a prompt."""
    request = Request("solo", list(prompt), params, frozenset([EOS]))
    return [o.token_id for o in generate(model, request) if o.token_id is not None]


def llm_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Return an `LLM` that uses an engine which is built already."""
    phase = engine.phase.slug
    monkeypatch.setattr(find_phase(phase), "build_engine", lambda config: engine)
    return LLM("a ready model", phase=phase)


def assert_answered(outputs: Sequence[StepOutput], requests: Sequence[Request], model: Any = None) -> None:
    """Assert that each request got the tokens that it gets alone, once and in order, and one terminal output."""
    for request in requests:
        own = [output for output in outputs if output.request_id == request.request_id]
        if model is None or isinstance(model, RememberingModel):
            expected = continuation(request.prompt_token_ids, request.params.max_new_tokens)
        else:
            expected = solo(model, request.prompt_token_ids, request.params)
        assert [output.error for output in own if output.error] == []
        assert [output.token_id for output in own] == expected
        assert [output.completion_tokens for output in own] == list(range(1, len(expected) + 1))
        assert [output.finished for output in own] == [False] * (len(own) - 1) + [True]


def assert_all_free(engine: Engine) -> None:
    """Assert that no column is used or reserved, no request waits or runs, and no slot had to be reclaimed."""
    pool = engine.runner.pool
    assert (pool.used_tokens, pool.reserved_tokens) == (0, 0)
    assert engine.scheduler.active == []
    assert engine.scheduler.num_waiting == 0
    assert engine.telemetry.counters.reclaimed_slots == 0


def assert_served(engine: Engine, requests: Sequence[Request], outputs: Sequence[StepOutput] = ()) -> None:
    """Run an engine until it is idle. All requests must be answered (`outputs` came before), all memory free."""
    assert_answered([*outputs, *run(engine)], requests, engine.runner.model)
    assert_all_free(engine)


# ---------------------------------------------------------------------- a scheduler without an engine


@dataclass(frozen=True)
class Variant:
    """A phase with some options."""

    phase: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.phase, *(str(value) for value in self.options.values())])

    @classmethod
    def of(cls, phase: str, **options: Any) -> Variant:
        """Return a phase with those of the options that the phase has."""
        known = find_phase(phase).Config.model_fields
        return cls(phase, {name: value for name, value in options.items() if name in known})

    def config(self, **options: Any) -> Any:
        return find_phase(self.phase).Config(**(self.options | options))

    def pool(self, shape: KVShape = SMALLEST, **options: Any) -> Any:
        return find_phase(self.phase).build_engine.pool(
            self.config(**({"max_seq_len": 64} | options)), shape, CPU
        )

    def build(self, model: Any = None, **options: Any) -> Engine:
        return build(self.phase, model, **(self.options | options))

    def bench(self, **options: Any) -> Bench:
        return Bench(self.phase, **(self.options | options))


def ids(requests: Sequence[Request]) -> list[str]:
    return [request.request_id for request in requests]


class Bench:
    """A scheduler and its pool without a model: every pass succeeds, and every token is a 1."""

    def __init__(self, phase: str, **options: Any) -> None:
        builder = find_phase(phase).build_engine
        config = builder.config(**({"max_seq_len": 4096} | options))
        self.clock = Clock()
        self.scheduler = builder.scheduler(config, self.clock)
        self.pool: Any = builder.pool(config, SMALLEST, CPU)
        self._arrivals = itertools.count()

    def request(self, prompt: int, new: int = 64, **fields: Any) -> Request:
        """Return the next request of r0, r1, …, with `prompt` prompt tokens and up to `new` new ones."""
        arrival = next(self._arrivals)
        request = Request(f"r{arrival}", [1] * prompt, greedy(new), **fields)
        request.arrival = arrival
        return request

    def add(self, *prompts: int, **fields: Any) -> list[Request]:
        requests = [self.request(prompt, **fields) for prompt in prompts]
        for request in requests:
            assert self.scheduler.add_request(request)
        return requests

    def hold(self, tokens: int) -> Request:
        """Return a request that decodes and holds memory for `tokens` tokens."""
        (holder,) = self.add(tokens)
        assert self.pool.reserve(holder, tokens)
        self.scheduler.waiting.remove(holder)
        self.scheduler.active.append(holder)
        holder.start_prefill()
        holder.start_decode()
        return holder

    def make_room(self) -> None:
        """Preempt requests as an engine does before it admits, and release their memory."""
        while preempted := self.scheduler.make_room(self.pool):
            for each in preempted:
                self.pool.release(each)

    def begin(self) -> list[str]:
        """Do what an engine does before it executes a plan. Returns the ids of the active requests."""
        for done in self.scheduler.retire():
            self.pool.release(done)
        self.make_room()
        self.scheduler.admit(self.pool)
        assert_consistent(self.pool)
        return self.active

    def admitted(self) -> list[str]:
        """Begin a step. Returns the ids of the requests that it admits."""
        before = self.active
        return [name for name in self.begin() if name not in before]

    def step(self) -> tuple[list[str], list[tuple[str, int, int]]]:
        """Run a step. Returns the ids of the requests that decode, and the chunks of the others."""
        self.begin()
        plan = self.scheduler.plan()
        for chunk in plan.prefill:
            chunk.request.prefill_progress = chunk.end
            if chunk.is_last and not chunk.request.is_terminal:
                chunk.request.start_decode()
                chunk.request.token_ids.append(1)
        for request in plan.decode:
            if not request.is_terminal:
                request.prefill_progress += 1
                request.token_ids.append(1)
        chunks = [(chunk.request.request_id, chunk.start, chunk.end) for chunk in plan.prefill]
        return ids(plan.decode), chunks

    @property
    def active(self) -> list[str]:
        return ids(self.scheduler.active)

    @property
    def waiting(self) -> list[str]:
        return ids(list(self.scheduler.waiting))

    @property
    def state(self) -> Any:
        """Everything that a plan must not change."""
        requests = [*self.scheduler.waiting, *self.scheduler.active]
        fields = [(f.name, str(getattr(each, f.name))) for each in requests for f in dataclasses.fields(each)]
        return fields, self.waiting, self.active, str(vars(self.pool))


# ---------------------------------------------------------------------- engines in a thread

TIMEOUT_S = 20.0


@contextlib.asynccontextmanager
async def working(engine: Engine) -> AsyncIterator[LocalEngine]:
    """Serve an engine on the event loop for the block, and stop it at the end, also after an error."""
    async_engine = LocalEngine(engine)
    async_engine.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield async_engine
    finally:
        await async_engine.stop()
    assert not async_engine.process.running


def submit(async_engine: AsyncEngine, prompt: str, params: SamplingParams) -> RequestStream:
    with async_engine.hold_places():
        return async_engine.submit([async_engine.maker.create(prompt, params)])[0]


async def read(stream: RequestStream) -> list[StepOutput]:
    return [output async for arrived in arriving([stream]) for _, output in arrived]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)
