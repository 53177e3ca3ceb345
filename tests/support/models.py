"""Tiny checkpoints with random weights, transformers as the oracle, and passes over a pool of scattered blocks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from common.engine.reference import ContiguousCache
from common.errors import StartupError
from common.kv import KVPool, Span
from common.models.layers import CausalLM, Quantization, TokenBatch
from common.models.registry import ZOO, load_model, open_checkpoint
from common.request import Request, SamplingParams
from phase6_paged import Config
from phase6_paged.cache import PagedKVCachePool
from tests.support.pools import CPU as CPU
from tests.support.pools import shuffle_free_blocks

if TYPE_CHECKING:  # importing it takes five seconds, and most tests do without
    from transformers import PreTrainedModel

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
ZOO_NAMES = ("llama-tiny", "qwen3-tiny", "gemma3-tiny")

# Shapes that catch mix-ups: no two sizes are equal, heads are grouped, head_dim is not hidden_size / heads.
_SHAPE = {
    "vocab_size": 97,
    "hidden_size": 42,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_OWN = {
    "llama": {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 5_000.0}},
    "mistral": {"sliding_window": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 5_000.0}},
    "qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0}},
    "qwen3": {"rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0}},
    "gemma3_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 3_000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 40_000.0},
        },
    },
}


def save_tiny(
    folder: Path, architecture: str, *, seed: int = 0, shard_size: str = "1GB", **entries: Any
) -> Path:
    """Write a checkpoint (float32 safetensors, config.json in the style of transformers 5) with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(architecture, **(_SHAPE | _OWN[architecture] | entries))
    oracle = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fill(oracle, seed)
    oracle.save_pretrained(folder, max_shard_size=shard_size)
    return folder


def fill(model: PreTrainedModel, seed: int) -> None:
    """Draw weights that keep activations' size from layer to layer, make attention selective, and logits differ."""
    generator = torch.Generator().manual_seed(seed)
    # Gemma multiplies by 1 + weight, and embeddings by the root of the hidden size.
    gemma = model.config.model_type == "gemma3_text"
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            parameter.data = 0.3 * noise + (0.0 if gemma else 1.0)
        elif name.endswith(".bias"):
            parameter.data = 0.3 * noise
        elif parameter.ndim == 2 and "embed" not in name and "lm_head" not in name:
            parameter.data = 1.5 * noise / parameter.shape[1] ** 0.5
        else:
            parameter.data = 0.3 * noise
    model.tie_weights()


def oracle_of(folder: Path) -> PreTrainedModel:
    """Load the checkpoint with transformers: in float32, with its plain (eager) attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.no_grad()
def oracle_logits(oracle: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """Return transformers' logits at every position, [T, vocab]."""
    return oracle(torch.tensor([list(token_ids)])).logits[0]


def load(
    folder: Path | str,
    *,
    dtype: torch.dtype = torch.float32,
    max_positions: int = 512,
    keep_groups: bool = False,
    quantize: Quantization | None = None,
) -> CausalLM:
    return load_model(
        open_checkpoint(str(folder)),
        device=CPU,
        dtype=dtype,
        max_positions=max_positions,
        keep_groups=keep_groups,
        quantize=quantize,
    )


def zoo(name: str) -> Path:
    return ZOO / name


def refusal_of(function: Callable[..., object], *arguments: object) -> str:
    """Return the message of the StartupError that a call raises, which must be one line."""
    with pytest.raises(StartupError) as caught:
        function(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def draw_ids(count: int, vocab_size: int = 97, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab_size) for _ in range(count)]


def read_config(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return loaded


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


# ---------------------------------------------------------------------- passes


def scattered(model: CausalLM, capacities: Sequence[int], block_size: int = 3) -> PagedKVCachePool:
    """Return slots 0, 1, … of given capacities, whose blocks lie anywhere in the store."""
    config = Config(
        max_seq_len=max(capacities),
        max_batch_size=len(capacities),
        block_size=block_size,
        num_blocks=sum(-(-capacity // block_size) for capacity in capacities),
    )
    pool = PagedKVCachePool(config, model.config.kv_shape(model.dtype), model.device)
    shuffle_free_blocks(pool, seed=0)
    for capacity in capacities:
        pool.grow(pool.allocate_slot(), capacity)
    return pool


def run_pass(model: CausalLM, pool: KVPool, pieces: Sequence[tuple[int, Sequence[int]]]) -> list[Tensor]:
    """Compute one pass over pieces of (slot, next tokens). Returns each piece's logits, [tokens, vocab]."""
    spans = []
    for slot, ids in pieces:
        start = pool.get_seq_len(slot)
        spans.append(Span.exact(slot, start, start + len(ids)))
    view = pool.view(spans)
    flat = [token_id for _, ids in pieces for token_id in ids]
    logits = model(TokenBatch(torch.tensor(flat), view.positions, torch.arange(len(flat))), view)
    view.advance()
    return list(logits.split([len(ids) for _, ids in pieces]))


def solo_logits(model: CausalLM, token_ids: Sequence[int]) -> Tensor:
    """Return the logits of a sequence that is computed alone and in one pass, [T, vocab]."""
    cache = ContiguousCache(model.config.kv_shape(model.dtype), model.device, len(token_ids))
    request = Request(request_id="solo", prompt_token_ids=list(token_ids), params=SamplingParams())
    cache.reserve(request, len(token_ids))
    return run_pass(model, cache, [(0, token_ids)])[0]


def largest_difference(a: Tensor, b: Tensor) -> float:
    """max |a - b|; NaN counts as infinite."""
    assert a.shape == b.shape
    return (a.double() - b.double()).abs().nan_to_num(nan=torch.inf).max().item()
