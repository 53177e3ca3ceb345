"""Phase 10's runner. It opens the pool's file for the model."""

from __future__ import annotations

import hashlib
import time

import torch

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
            assert config.max_seq_len is not None
            pool.open_tier(config, *probe(model, pool, config.max_seq_len))


def probe(model: CausalLM, pool: TieredPool, most_tokens: int) -> tuple[bytes, float]:
    """Compute a prompt of tokens from the whole vocabulary, in the empty pool.

    Returns:
        A fingerprint (32 bytes) of what keys and values depend on beside their text: the model's shape, and the
        keys and values that its weights, types and kernels give for this prompt. And the seconds per token.
    """
    device, count = model.device, min(PROBE_TOKENS, pool.max_request_tokens(), most_tokens)
    request = Request("probe", [0], SamplingParams())
    pool.reserve(request, count)
    assert request.slot is not None
    view = pool.view([Span.exact(request.slot, 0, count)])
    token_ids = torch.arange(count, device=device) * (model.config.vocab_size // count)
    batch = TokenBatch(token_ids, view.positions, torch.tensor([count - 1], device=device))
    began_s = time.perf_counter()
    with torch.inference_mode():
        model(batch, view)
    computed = pool.load(pool.block_table(request.slot))  # waits for a GPU
    took_s = time.perf_counter() - began_s
    pool.release(request)
    facts = model.config, model.dtype, model.weight_dtype, torch.__version__, kernels_on(device)
    content = b"".join([repr(facts).encode(), *computed])
    return hashlib.blake2b(content, digest_size=32).digest(), took_s / count
