"""Phase 10's runner. It opens the pool's file for the model, and waits for the disk if nothing can be computed."""

from __future__ import annotations

import hashlib
import itertools
import time

import torch

from common.engine.reference import ContiguousCache
from common.engine.scheduling import StepPlan
from common.engine.telemetry import Telemetry
from common.kv import Span
from common.models.layers import CausalLM, TokenBatch
from common.request import Request, SamplingParams, StepOutput
from kernels.dispatch import kernels_on
from phase10_speculative.runner import SpeculativeRunner
from phase11_tiered.cache import TieredPool
from phase11_tiered.config import Config

PROBE_TOKENS = 128
LATEST_STEPS = 256  # steps from which the time of a prompt's token is measured
WAIT_S = 0.005  # most time of a step that waits for the disk: then the engine looks for new requests


class TieredRunner(SpeculativeRunner):
    """Phase 10's runner."""

    config: Config
    pool: TieredPool

    def __init__(self, config: Config, model: CausalLM, pool: TieredPool, telemetry: Telemetry) -> None:
        super().__init__(config, model, pool, telemetry)
        if config.kv_tier is not None:
            fingerprint, self._probe_s = probe(model, pool.block_size)
            pool.open_tier(config, fingerprint, self.token_s)

    def execute(self, plan: StepPlan) -> list[StepOutput]:
        if self.pool.tier is not None and not (plan.decode or plan.prefill or self.in_flight):
            self.pool.tier.wait(WAIT_S)
        return super().execute(plan)

    def token_s(self) -> float:
        """Return the seconds that a token of a prompt took in the latest steps; at first, in the probe."""
        latest = itertools.islice(reversed(self.telemetry.records), LATEST_STEPS)
        steps = [(step.duration_s, step.prefill_tokens) for step in latest if step.prefill_tokens]
        seconds, tokens = map(sum, zip(*steps, strict=True)) if steps else (0.0, 0)
        return seconds / tokens if seconds else self._probe_s


def probe(model: CausalLM, block_size: int) -> tuple[bytes, float]:
    """Compute a prompt of tokens from the whole vocabulary.

    Returns:
        A fingerprint (32 bytes) of what keys and values depend on beside their text: the model's shape, and the
        keys and values that its weights, types and kernels give for this prompt. And the seconds per token.
    """
    count = min(PROBE_TOKENS, model.max_positions)
    shape, device = model.config.kv_shape(model.dtype), model.device
    cache = ContiguousCache(shape, device, count)
    cache.reserve(Request("probe", [0], SamplingParams()), count)
    view = cache.view([Span.exact(0, 0, count)])
    token_ids = torch.arange(count, device=device) * (model.config.vocab_size // count)
    began_s = time.perf_counter()
    with torch.inference_mode():
        batch = TokenBatch(token_ids, view.positions, torch.tensor([count - 1], device=device))
        model(batch, view)
        numbers = [store.view(torch.uint8).cpu().numpy().tobytes() for store in (*cache.k, *cache.v)]
    token_s = (time.perf_counter() - began_s) / count
    made_of = (
        model.config,
        model.dtype,
        model.weight_dtype,
        kernels_on(device),
        block_size,
        torch.__version__,
    )
    digest = hashlib.blake2b(repr(made_of).encode(), digest_size=32)
    for each in numbers:
        digest.update(each)
    return digest.digest(), token_s
