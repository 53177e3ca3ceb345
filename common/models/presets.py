"""The shapes of `dummy:<preset>`: models with random weights, for measuring without a download.

A preset repeats the shape in the `config.json` of the model that it names. (`llama-135m` has SmolLM2's shape, and
the shapes with 1, 15 and 60 million parameters are our own.) A dummy uses the tokenizer of the zoo's model of the
same architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "head_dim": 64,
}
_LLAMA_32 = _LLAMA | {
    "vocab_size": 128_256,
    "intermediate_size": 8192,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rope_parameters": _LLAMA3_ROPE,
}
_QWEN3 = {
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
_GEMMA3 = {
    "model_type": "gemma3_text",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "head_dim": 256,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32_768,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}


def _shape(hidden: int, layers: int, heads: int, mlp: int, **entries: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": mlp,
        **entries,
    }


_SMALL = {"vocab_size": 32_000, "max_position_embeddings": 8192}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "llama-1m": _LLAMA | _shape(128, 2, 2, 256, num_key_value_heads=1, **_SMALL | {"vocab_size": 4096}),
    "llama-15m": _LLAMA | _shape(320, 8, 5, 1024, num_key_value_heads=1, **_SMALL | {"vocab_size": 16_384}),
    "llama-60m": _LLAMA | _shape(512, 12, 8, 1792, num_key_value_heads=4, **_SMALL),
    "llama-135m": _LLAMA
    | _shape(576, 30, 9, 1536, num_key_value_heads=3, vocab_size=49_152, max_position_embeddings=8192),
    "llama-3.2-1b": _LLAMA_32 | _shape(2048, 16, 32, 8192),
    "llama-3.2-3b": _LLAMA_32 | _shape(3072, 28, 24, 8192, head_dim=128),
    "llama-3.1-8b": _LLAMA_32
    | _shape(4096, 32, 32, 14_336, head_dim=128, tie_word_embeddings=False)
    | {"rope_parameters": _LLAMA3_ROPE | {"factor": 8.0}},
    "qwen3-60m": _QWEN3 | _shape(512, 12, 8, 1536, head_dim=64, num_key_value_heads=4) | _SMALL,
    "qwen3-0.6b": _QWEN3 | _shape(1024, 28, 16, 3072),
    "qwen3-1.7b": _QWEN3 | _shape(2048, 28, 16, 6144),
    "qwen3-4b": _QWEN3 | _shape(2560, 36, 32, 9728),
    "gemma3-60m": _GEMMA3 | _shape(512, 12, 4, 2048, head_dim=128, query_pre_attn_scalar=128) | _SMALL,
    "gemma-3-1b": _GEMMA3 | _shape(1152, 26, 4, 6912, vocab_size=262_144),
}

TOKENIZER_OF: Mapping[str, str] = {
    "llama": "llama-tiny",
    "qwen3": "qwen3-tiny",
    "gemma3_text": "gemma3-tiny",
}
