"""Builds an engine from options: loads the model and makes its KV pool, scheduler and runner."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch

from common.devices.resolve import resolve_device, resolve_dtype
from common.devices.streams import call_apart
from common.engine.config import EngineConfig
from common.engine.engine import Engine
from common.engine.reference import ContiguousCache
from common.engine.requests import Phase
from common.engine.runner import Runner
from common.engine.scheduling import Clock, Scheduler
from common.engine.telemetry import Telemetry
from common.errors import StartupError
from common.kv import KVPool, KVShape, Span
from common.models.checkpoint import Checkpoint
from common.models.generation_config import in_words, origin_of
from common.models.layers import CausalLM, TokenBatch
from common.models.registry import default_params, load_model, open_checkpoint, weight_bytes
from common.request import Request, SamplingParams
from common.sampling.draw import sample
from common.startup.control_groups import limit_threads
from common.startup.memory import check_memory
from common.startup.sizing import log_sizes, sized_for, with_context
from common.startup.warm_up import warm_up
from common.text.tokenizer import Tokenizer
from kernels.dispatch import INTERPRETED, kernels_on
from kernels.few_rows_linear import whole_sums
from kernels.native import has_products, load_native_kernels
from kernels.paged_attention import SPLIT_COLUMNS

logger = logging.getLogger(__name__)

ConfigT = TypeVar("ConfigT", bound=EngineConfig)


@dataclass(frozen=True, slots=True)
class EngineBuilder(Generic[ConfigT]):
    """Builds engines of one phase from the phase's classes. A phase's `build_engine` is an instance of this class.

    Attributes:
        phase: the phase's number, name and idea.
        config: the class of the phase's options.
        scheduler: the class of the phase's scheduler.
        runner: the class of the phase's runner.
        pool: makes the KV pool from a config, the shape of a token's keys and values, and a device.
    """

    phase: Phase
    config: type[ConfigT]
    scheduler: Callable[[ConfigT, Clock], Scheduler]
    runner: type[Runner]
    pool: Callable[[ConfigT, KVShape, torch.device], KVPool]

    def __call__(
        self,
        config: ConfigT,
        *,
        model: CausalLM | None = None,
        tokenizer: Tokenizer | None = None,
        clock: Clock = time.monotonic,
    ) -> Engine:
        """Build an engine around a loaded model and its tokenizer, or around the model that `config.model` names.

        The engine is built in a thread that ends afterwards, so the calling thread gets no pool of libgomp workers.

        Raises:
            ValueError: `model` is given without `tokenizer`.
            StartupError: the model cannot be loaded, an option does not fit the model or the device, or memory is
                short.
        """
        limit_threads()
        engine = call_apart(functools.partial(self._build, config, model, tokenizer, clock))
        warm_up(engine.runner, engine.scheduler)
        return engine

    def _build(
        self, config: ConfigT, model: CausalLM | None, tokenizer: Tokenizer | None, clock: Clock
    ) -> Engine:
        given = config
        if model is None:
            checkpoint = open_checkpoint(config.model)
            if checkpoint.unused:
                logger.warning("%s: not used: %s", config.model, "; ".join(checkpoint.unused))
            params = _default_params(checkpoint, config)
            config, model, tokenizer = _load(checkpoint, config)
        elif tokenizer is None:
            raise ValueError("a ready model needs its tokenizer")
        else:
            params, made_of = SamplingParams(), (model.config, model.dtype, model.device)
            config = with_context(config, *made_of, weights=0, limit=model.max_positions)
            config = sized_for(config, *made_of, weights=0)
            check_memory(config, *made_of, weights=0)
        log_sizes(given, config)
        shape = model.config.kv_shape(model.dtype)
        telemetry = Telemetry()
        runner = self.runner(config, model, self.pool(config, shape, model.device), telemetry)
        return Engine(
            phase=self.phase,
            config=config,
            scheduler=self.scheduler(config, clock),
            runner=runner,
            tokenizer=tokenizer,
            telemetry=telemetry,
            default_params=params,
            clock=clock,
        )


def _default_params(checkpoint: Checkpoint, config: EngineConfig) -> SamplingParams:
    """Return the default sampling parameters of requests, and log them.

    Raises:
        StartupError: the checkpoint suggests an invalid value.
    """
    params = default_params(checkpoint) if config.generation_config == "auto" else SamplingParams()
    origin = {
        "server": "the server's defaults",
        "infer fetch": "its authors' recommendation",
        "generation_config.json": "its generation_config.json",
        "GGUF file": "its GGUF file",
    }[origin_of(params, config.model, is_gguf=checkpoint.folder is None)]
    logger.info(
        "requests to %s that name no sampling parameters get %s: %s", config.model, in_words(params), origin
    )
    return params


def _load(checkpoint: Checkpoint, config: ConfigT) -> tuple[ConfigT, CausalLM, Tokenizer]:
    """Load a checkpoint's model and tokenizer. Returns the options with sizes for the device, and both.

    The model's rotary tables end at `max_seq_len`. Memory is checked before the weights are read, since reading
    takes long.

    Raises:
        StartupError: there is no such device, `max_seq_len` exceeds the model's positions, memory is short, the
            checkpoint cannot be read, or the device cannot compute with its weights.
    """
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, checkpoint.config.dtype, device)
    native = config.native_kernels and device.type == "cpu" and not INTERPRETED and load_native_kernels()
    asked = config.quantize if config.quantize in ("int8", "int4") else None
    # How the linear layers are held: as the option says, or as the checkpoint has them.
    quantized: Literal["none", "layers", "int8", "int4"]
    quantized = asked or ("layers" if checkpoint.is_int8 else "none")
    if checkpoint.is_int8 and quantized == "int4":  # the head becomes a matrix of eight bits
        quantized = "int8"
    keep_groups = config.quantize == "auto" and native and has_products(dtype)
    if device.type == "cuda" and quantized != "none":
        raise StartupError(
            f"{'int8' if quantized == 'layers' else quantized} weights are for a CPU so far: use --device cpu, "
            "or a model without --quantize"
        )
    form_of = checkpoint.form_of if keep_groups else None
    weights = weight_bytes(checkpoint.config, dtype, packed=native, quantized=quantized, form_of=form_of)
    limit = checkpoint.config.max_position_embeddings
    config = with_context(config, checkpoint.config, dtype, device, weights=weights, limit=limit)
    config = sized_for(config, checkpoint.config, dtype, device, weights=weights)
    assert config.max_seq_len is not None
    check_memory(config, checkpoint.config, dtype, device, weights=weights)
    tokenizer = checkpoint.tokenizer(config.chat_template)
    if config.chat_template is not None:  # the checkpoint knows the end tokens of its own template only
        ends = checkpoint.config.eos_token_ids | _ends_of_turn(tokenizer)
        checkpoint.config = dataclasses.replace(checkpoint.config, eos_token_ids=ends)
    if config.escape_special_tokens:
        tokenizer.escape_special_tokens()
    started = time.perf_counter()
    model = load_model(
        checkpoint,
        device=device,
        dtype=dtype,
        max_positions=config.max_seq_len,
        keep_groups=keep_groups,
        quantize=asked,
    )
    if native:
        model.pack()
    if device.type == "cuda":
        whole_sums()
    if native or device.type == "cuda":
        model.measure_batch_invariance()
    _run_every_kind_of_pass(model)
    seconds, kernels = time.perf_counter() - started, kernels_on(device)
    held = str(dtype)
    if keep_groups and model.stored_as is not None:
        held = f"{model.stored_as}, computed in {held.removeprefix('torch.')}"
    elif checkpoint.quantization is not None:
        held = f"{checkpoint.quantization}, dequantized to {held.removeprefix('torch.')}"
    if quantized != "none":
        held += f", {str(model.weight_dtype).removeprefix('torch.')} weights"
    invariant = "" if model.batch_invariant else "not "
    logger.info(
        "loaded %s (%s, %s, %s kernels, %sbatch invariant) in %.1f s",
        config.model,
        device,
        held,
        kernels,
        invariant,
        seconds,
    )
    return config, model, tokenizer


def _ends_of_turn(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the id of the token that the chat template writes after an answer, if there is one."""
    added = {token.content: i for i, token in tokenizer.backend.get_added_tokens_decoder().items()}
    end = None if tokenizer.chat_template is None else tokenizer.chat_template.end_of_turn(added)
    return frozenset(i for text, i in added.items() if text == end and i < tokenizer.vocab_size)


def _run_every_kind_of_pass(model: CausalLM) -> None:
    """Run a forward pass of each kind now. Otherwise the first requests would wait for its kernels to be compiled.

    On a GPU a kernel is compiled when it is first launched. The third pass has a decoding sequence of more than
    `SPLIT_COLUMNS` tokens, if the model can have so many: attention splits such a sequence, by kernels of its own.
    """
    columns = min(model.max_positions, SPLIT_COLUMNS + 16)
    prompt = min(8, columns - 1)
    cache = ContiguousCache(model.config.kv_shape(model.dtype), model.device, columns, sequences=2)
    requests = [
        Request("warm-up, greedy", [0], SamplingParams(temperature=0.0)),
        Request("warm-up, sampled", [0], SamplingParams(top_p=0.9)),
    ]
    for request in requests:
        cache.reserve(request, columns)
    prefill = Span.exact(0, 0, prompt), Span.exact(1, 0, prompt)
    decode = Span.exact(0, prompt, prompt + 1), Span.exact(1, prompt, prompt + 1)
    mixed = Span.exact(0, columns - 1, columns), Span.exact(1, 0, prompt)
    for spans in (prefill, decode, mixed):
        # Earlier columns need not be computed: the pass may read zeros there.
        cache.advance(Span.exact(span.slot, 0, span.start) for span in spans)
        view = cache.view(spans)
        ends = list(itertools.accumulate(span.end - span.start for span in spans))
        batch = TokenBatch(
            token_ids=torch.zeros(ends[-1], dtype=torch.int64, device=model.device),
            positions=view.positions,
            logit_rows=torch.tensor(ends, device=model.device) - 1,
        )
        with torch.inference_mode():
            sampled = sample(model(batch, view), requests)
        sampled.token_ids.tolist()  # waits for the device, so that its errors are raised here
