"""Memory of real models: keys and values by the server's own helper, weights by its loader's."""

from __future__ import annotations

import torch

from common.kv import kv_bytes
from common.memory import format_bytes
from common.models.config import ModelConfig
from common.models.registry import open_checkpoint, weight_bytes

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


def weight_size(model: str, times: int = 1) -> str:
    """A model's weights in bfloat16, read or held so many times, such as `6.0 GB`."""
    return format_bytes(times * weight_bytes(config_of(model), torch.bfloat16))


def memory_table() -> str:
    """What eight sequences of 4096 tokens take beside the weights, for each model in bfloat16."""
    rows = [
        "| model | layers | KV heads | head size | KV of one token "
        f"| weights | KV of {SEQUENCES} × {LENGTH} tokens | together |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for model in MODELS:
        config = config_of(model)
        tokens = SEQUENCES * LENGTH
        total = weight_bytes(config, torch.bfloat16) + kv_bytes(config, tokens, torch.bfloat16)
        rows.append(
            f"| {model} | {config.num_layers} | {config.num_kv_heads} | {config.head_dim} "
            f"| {kv_bytes(config, 1, torch.bfloat16) / 1024:.0f} kB "
            f"| {weight_size(model)} | {kv_size(model, tokens)} | {format_bytes(total)} |"
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
