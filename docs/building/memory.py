"""KV memory of real models, computed by the helper that the server itself uses."""

from __future__ import annotations

import torch

from common.kv import KVShape, kv_bytes
from common.memory import format_bytes
from common.models.config import ModelConfig
from common.models.registry import open_checkpoint

MODELS = {
    "Llama 3.2 1B": "dummy:llama-3.2-1b",
    "Llama 3.2 3B": "dummy:llama-3.2-3b",
    "Qwen3 1.7B": "dummy:qwen3-1.7b",
    "Qwen3 4B": "dummy:qwen3-4b",
    "Gemma 3 1B": "dummy:gemma-3-1b",
}
SEQUENCES, LENGTH = 8, 4096


def config_of(model: str) -> ModelConfig:
    return open_checkpoint(MODELS[model]).config


def kv_size(model: str, tokens: int, dtype: str = "bfloat16") -> str:
    """KV memory of `tokens` tokens, such as `3.5 GB`."""
    return format_bytes(kv_bytes(config_of(model), tokens, getattr(torch, dtype)))


def memory_table() -> str:
    """KV memory of eight sequences of 4096 tokens, for each model."""
    rows = [
        f"| model | layers | KV heads | head size | one token | {SEQUENCES} × {LENGTH} tokens |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for model in MODELS:
        config = config_of(model)
        per_token = KVShape.of(config, torch.bfloat16).bytes_per_token
        rows.append(
            f"| {model} | {config.num_layers} | {config.num_kv_heads} | {config.head_dim} "
            f"| {per_token / 1024:.0f} kB | {kv_size(model, SEQUENCES * LENGTH)} |"
        )
    return "\n".join(rows) + "\n"


def sliding_share(model: str) -> dict[str, str]:
    """What a model's sliding layers could do without: how many they are, how far they see, what they waste."""
    config = config_of(model)
    windows = [layer.window for layer in config.layers if layer.window is not None]
    assert windows, f"{model} has no sliding layers"
    visible = sum(min(layer.window or LENGTH, LENGTH) for layer in config.layers)
    return {
        "sliding": str(len(windows)),
        "layers": str(config.num_layers),
        "window": str(windows[0]),
        "needed": f"{visible / (config.num_layers * LENGTH):.0%}",
    }
