"""Phase 10's runner. It opens the pool's file for the model."""

from __future__ import annotations

import hashlib
import time

import torch

from common.engine.reference import ContiguousCache
from common.engine.telemetry import Telemetry
from common.kv import Span
from common.models.layers import CausalLM, TokenBatch
from common.request import Request, SamplingParams
from kernels.dispatch import kernels_on
from phase10_speculative.runner import SpeculativeRunner
from phase11_tiered.cache import TieredPool
from phase11_tiered.config import Config

PROBE_TOKENS = 128


class TieredRunner(SpeculativeRunner):
    """Phase 10's runner."""

    def __init__(self, config: Config, model: CausalLM, pool: TieredPool, telemetry: Telemetry) -> None:
        super().__init__(config, model, pool, telemetry)
        if config.kv_tier is not None:
            pool.open_tier(config, *probe(model, pool.block_size))


def probe(model: CausalLM, block_size: int) -> tuple[bytes, float]:
    """Compute a prompt of tokens from the whole vocabulary.

    Returns:
        A fingerprint (32 bytes) of what keys and values depend on beside their text: the model's shape, and the
        keys and values that its weights, types and kernels give for this prompt. And the seconds per token.
    """
    device, count = model.device, min(PROBE_TOKENS, model.max_positions)
    cache = ContiguousCache(model.config.kv_shape(model.dtype), device, count)
    cache.reserve(Request("probe", [0], SamplingParams()), count)
    view = cache.view([Span.exact(0, 0, count)])
    token_ids = torch.arange(count, device=device) * (model.config.vocab_size // count)
    batch = TokenBatch(token_ids, view.positions, torch.tensor([count - 1], device=device))
    began_s = time.perf_counter()
    with torch.inference_mode():
        model(batch, view)
    computed = [store.view(torch.uint8).cpu().numpy() for store in (*cache.k, *cache.v)]  # waits for a GPU
    took_s = time.perf_counter() - began_s
    types = model.dtype, model.weight_dtype, torch.__version__
    digest = hashlib.blake2b(
        repr((model.config, types, kernels_on(device), block_size)).encode(), digest_size=32
    )
    for store in computed:
        digest.update(store.data)
    return digest.digest(), took_s / count
