"""Putting an engine together: from options to a model, its KV pool, a scheduler and a runner."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import psutil
import torch

from common.config import EngineConfig, resolve_device, resolve_dtype
from common.engine import Clock, Engine, Phase
from common.errors import StartupError
from common.generate import generate
from common.kv import KVPool, KVShape
from common.models.layers import CausalLM
from common.models.registry import load_model, open_checkpoint
from common.request import Request, SamplingParams
from common.runner import Runner
from common.scheduling import Scheduler
from common.telemetry import Telemetry
from common.text import Tokenizer

logger = logging.getLogger(__name__)

ConfigT = TypeVar("ConfigT", bound=EngineConfig)
RunnerFactory = Callable[[CausalLM, KVPool, Telemetry], Runner]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBuilder(Generic[ConfigT]):
    """A phase's `build_engine`: the parts that are its own, and how they become an engine.

    Attributes:
        phase: what the phase says of itself.
        scheduler: makes the scheduler of a config and a clock.
        runner: the runner's class, which may depend on the config.
        pool: makes the KV pool of a config, what a token takes, and a device.
    """

    phase: Phase
    scheduler: Callable[[ConfigT, Clock], Scheduler]
    runner: Callable[[ConfigT], RunnerFactory]
    pool: Callable[[ConfigT, KVShape, torch.device], KVPool]

    def __call__(
        self,
        config: ConfigT,
        *,
        model: CausalLM | None = None,
        tokenizer: Tokenizer | None = None,
        clock: Clock = time.monotonic,
    ) -> Engine:
        """An engine around a ready model and its tokenizer, or the ones that `config.model` names.

        Raises:
            StartupError: the model cannot be loaded, an option asks for more than it has, or memory is short.
        """
        if model is None:
            model, tokenizer = _load(config)
        elif tokenizer is None:
            raise ValueError("a ready model needs its tokenizer")
        limit = config.resolve_max_seq_len(model.max_positions)
        config = config.model_copy(update={"max_seq_len": limit})
        shape = KVShape.of(model.config, model.dtype)
        check_kv_memory(config, shape, model.device)
        telemetry = Telemetry()
        pool = self.pool(config, shape, model.device)
        return Engine(
            phase=self.phase,
            config=config,
            scheduler=self.scheduler(config, clock),
            runner=self.runner(config)(model, pool, telemetry),
            tokenizer=tokenizer,
            telemetry=telemetry,
            clock=clock,
        )


def _load(config: EngineConfig) -> tuple[CausalLM, Tokenizer]:
    """The model and tokenizer that a config names. Its rotary tables end at the longest sequence served."""
    checkpoint = open_checkpoint(config.model)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, checkpoint.config.dtype, device)
    tokenizer = checkpoint.tokenizer()
    limit = config.resolve_max_seq_len(checkpoint.config.max_position_embeddings)
    started = time.perf_counter()
    model = load_model(checkpoint, device=device, dtype=dtype, max_positions=limit)
    _warm_up(model)
    logger.info("loaded %s (%s, %s) in %.1f s", config.model, device, dtype, time.perf_counter() - started)
    return model, tokenizer


def _warm_up(model: CausalLM) -> None:
    """A pass or two, so that the first client does not pay for what libraries prepare on first use."""
    for _ in generate(model, Request("warm-up", [0], SamplingParams(temperature=0.0, max_new_tokens=1))):
        pass


def check_kv_memory(config: EngineConfig, shape: KVShape, device: torch.device) -> None:
    """Say what the KV cache can grow to. StartupError: that is more than is free."""
    needed = config.kv_tokens() * shape.bytes_per_token
    free = free_memory(device)
    logger.info("KV cache: %s tokens = %s", config.kv_formula(), format_bytes(needed))
    if needed > free:
        raise StartupError(
            f"the KV cache can grow to {config.kv_formula()} tokens = {format_bytes(needed)}, but only "
            f"{format_bytes(free)} are free on {device}: {config.kv_advice()}"
        )


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken on `device`."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    return int(psutil.virtual_memory().available)


def format_bytes(count: int) -> str:
    """1 GB is 2**30 bytes here, as memory is sold."""
    return f"{count / 2**30:.1f} GB" if count >= 2**30 / 10 else f"{count / 2**20:.1f} MB"
