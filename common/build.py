"""Putting an engine together: from options to a model, its KV pool, a scheduler and a runner."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from common.config import EngineConfig, resolve_device, resolve_dtype
from common.engine import Clock, Engine, Phase
from common.generate import generate
from common.kv import KVPool, KVShape
from common.memory import check_memory
from common.models.layers import CausalLM
from common.models.registry import Checkpoint, load_model, open_checkpoint, weight_bytes
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
            checkpoint = open_checkpoint(config.model)
            config = _settle(config, checkpoint.config.max_position_embeddings)
            model, tokenizer = _load(checkpoint, config)
        elif tokenizer is None:
            raise ValueError("a ready model needs its tokenizer")
        else:
            config = _settle(config, model.max_positions)
            check_memory(config, model.config, model.dtype, model.device, weights=0)
        shape = KVShape.of(model.config, model.dtype)
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


def _settle(config: ConfigT, model_limit: int) -> ConfigT:
    """The options with the longest sequence resolved."""
    return config.model_copy(update={"max_seq_len": config.resolve_max_seq_len(model_limit)})


def _load(checkpoint: Checkpoint, config: EngineConfig) -> tuple[CausalLM, Tokenizer]:
    """A checkpoint's model and tokenizer. Its rotary tables end at the longest sequence served.

    That everything fits into memory is seen to first: weights take a while to read.
    """
    assert config.max_seq_len is not None
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, checkpoint.config.dtype, device)
    check_memory(config, checkpoint.config, dtype, device, weights=weight_bytes(checkpoint.config, dtype))
    tokenizer = checkpoint.tokenizer()
    started = time.perf_counter()
    model = load_model(checkpoint, device=device, dtype=dtype, max_positions=config.max_seq_len)
    _warm_up(model)
    logger.info("loaded %s (%s, %s) in %.1f s", config.model, device, dtype, time.perf_counter() - started)
    return model, tokenizer


def _warm_up(model: CausalLM) -> None:
    """A pass or two, so that the first client does not pay for what libraries prepare on first use."""
    for _ in generate(model, Request("warm-up", [0], SamplingParams(temperature=0.0, max_new_tokens=1))):
        pass
