"""Builds a phase's engine on a virtual clock. The engine has the phase's scheduler and pool and plans the phase's
passes, but it has no model and no KV memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from common.devices.resolve import resolve_dtype
from common.engine.config import EngineConfig
from common.engine.engine import Engine
from common.engine.telemetry import Telemetry
from common.kv import KVShape
from common.models.checkpoint import Checkpoint
from common.models.config import ModelConfig
from common.models.layers import CausalLM
from common.models.registry import open_checkpoint
from common.startup.phases import PhasePackage, find_phase
from common.text.tokenizer import Tokenizer
from phase11_tiered import Config as TieredConfig
from phase11_tiered import Pool as TieredPool
from phase11_tiered.runner import PROBE_TOKENS
from simulator.clock import VirtualClock
from simulator.cost import Cost, Work
from simulator.runner import accept, simulated
from simulator.tier import SimulatedTier

CPU = torch.device("cpu")

#: The pass by which phase 11's runner measures what computing costs.
PROBE = Work(0, 0, 0, PROBE_TOKENS, PROBE_TOKENS * (PROBE_TOKENS + 1) // 2, 1)


class NoStore(KVShape):
    """A KV shape whose stores take no memory: they are views of a single number."""

    def allocate(
        self, blocks: int, block_size: int, device: torch.device
    ) -> tuple[list[Tensor], list[Tensor]]:
        store = torch.zeros((), dtype=self.dtype, device=device).expand(blocks, block_size, 1, 1)
        return [store], [store]


@dataclass(frozen=True, slots=True)
class NoModel:
    """A model without weights: only the attributes that engine and runner read."""

    config: ModelConfig
    max_positions: int
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    is_packed: bool = False
    batch_invariant: bool = False


@functools.cache
def _opened(name: str) -> tuple[Checkpoint, Tokenizer]:
    checkpoint = open_checkpoint(name)
    return checkpoint, checkpoint.tokenizer()


def simulate_engine(
    phase: int | str | PhasePackage,
    cost: Cost,
    *,
    clock: VirtualClock | None = None,
    acceptance: float = 0.0,
    disk_bytes_s: float = 1e9,
    **options: Any,
) -> Engine:
    """Return a phase's engine, without a model. Its steps take the times of `cost`.

    Args:
        phase: the package, or a name that `find_phase` knows.
        cost: the times of passes and of the host's work.
        clock: the engine's clock; a new one if None.
        acceptance: the probability that a guess of phase 10 is right; 0: nothing is guessed.
        disk_bytes_s: the bytes that phase 11 reads in a second, if it has a `kv_tier` (no folder is touched).
        options: fields of the phase's `Config`. The default of `max_seq_len` is 4096, or the model's limit if less.

    Raises:
        StartupError: there is no such phase or model.
        pydantic.ValidationError: the phase has no such option, or the option's value is invalid.
    """
    package = find_phase(phase) if isinstance(phase, int | str) else phase
    clock = clock if clock is not None else VirtualClock()
    config: EngineConfig = package.Config(**options)
    checkpoint, tokenizer = _opened(config.model)
    limit = config.resolve_max_seq_len(checkpoint.config.max_position_embeddings)
    config = config.model_copy(update={"max_seq_len": limit})
    model = cast(CausalLM, NoModel(checkpoint.config, limit))
    builder = package.build_engine
    pool = builder.pool(config, NoStore(1, 1, 1, torch.float32), CPU)
    telemetry = Telemetry()
    scheduler = builder.scheduler(config, clock)
    # The runner would open a file for a model that computes.
    no_file = {"kv_tier": None} if isinstance(config, TieredConfig) else {}
    planner = builder.runner(config.model_copy(update=no_file), model, pool, telemetry)
    runner = simulated(planner, clock, cost)
    accept(runner, scheduler, acceptance)
    if isinstance(config, TieredConfig) and config.kv_tier is not None and isinstance(pool, TieredPool):
        dtype = resolve_dtype(config.dtype, checkpoint.config.dtype, CPU)
        block_bytes = config.block_size * checkpoint.config.kv_shape(dtype).bytes_per_token
        block_s = config.block_size * cost.pass_s(PROBE) / PROBE.tokens
        pool.tier = SimulatedTier(
            clock, block_bytes, config.kv_tier_bytes, block_s=block_s, bytes_s=disk_bytes_s
        )
        pool._store = lambda *_: None  # type: ignore[method-assign]  # there is no memory to write to
    return Engine(
        phase=package.PHASE,
        config=config,
        scheduler=scheduler,
        runner=runner,
        tokenizer=tokenizer,
        telemetry=telemetry,
        clock=clock,
    )
