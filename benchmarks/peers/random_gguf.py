"""Writes GGUF files with random weights in the groups of llama.cpp's Q4_K_M, to measure shapes without a download.

Files are kept in `peers` in the user's cache folder. Their tokenizers are for llama.cpp to load, not to use.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from tokenizers import pre_tokenizers

from common.models.config import ModelConfig
from common.models.presets import PRESETS
from common.models.registry import parse_config
from kernels.cache_folder import default_cache

Q4_K, Q6_K = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K

#: The float16 factors of a block, by their first byte: weights have a deviation of about 0.02.
FACTORS = {Q4_K: {0: 8e-5, 2: 6e-4}, Q6_K: {208: 1.5e-5}}

PRE_TOKENIZERS = {"llama": "llama-bpe", "qwen3": "qwen2"}


def random_gguf(preset: str) -> Path:
    """Return a file with the shape of a preset of Llama or Qwen 3. Writes it, if it is not there yet."""
    path = default_cache() / "peers" / f"{preset}-random-q4_k_m.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        _write(parse_config(PRESETS[preset]), unfinished)
        unfinished.rename(path)
    return path


def _matrices(config: ModelConfig) -> Iterator[tuple[str, int, int, gguf.GGMLQuantizationType]]:
    """Yield the name, the outputs, the inputs and the type of every matrix."""
    hidden, size = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    tied = config.tie_word_embeddings
    yield "token_embd", config.vocab_size, hidden, Q6_K if tied else Q4_K
    if not tied:
        yield "output", config.vocab_size, hidden, Q6_K
    count = config.num_layers
    for layer in range(count):
        # llama.cpp gives the first and the last eighth of the layers more bits, and every third between them.
        more = layer < count // 8 or layer >= 7 * count // 8 or (layer - count // 8) % 3 == 2
        own = Q6_K if more else Q4_K
        for name, outputs, inputs, kind in (
            ("attn_q", queries, hidden, Q4_K),
            ("attn_k", keys, hidden, Q4_K),
            ("attn_v", keys, hidden, own),
            ("attn_output", hidden, queries, Q4_K),
            ("ffn_gate", size, hidden, Q4_K),
            ("ffn_up", size, hidden, Q4_K),
            ("ffn_down", hidden, size, own),
        ):
            yield f"blk.{layer}.{name}", outputs, inputs, kind


def _norms(config: ModelConfig) -> Iterator[tuple[str, int]]:
    """Yield the name and the size of every norm."""
    yield "output_norm", config.hidden_size
    for layer in range(config.num_layers):
        for name in ("attn_norm", "ffn_norm"):
            yield f"blk.{layer}.{name}", config.hidden_size
        if config.architecture == "qwen3":
            for name in ("attn_q_norm", "attn_k_norm"):
                yield f"blk.{layer}.{name}", config.head_dim


def _write(config: ModelConfig, path: Path) -> None:
    writer = gguf.GGUFWriter(path, config.architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(500_000.0)
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = bytes_ + [f"<{token_id}>" for token_id in range(len(bytes_), config.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZERS[config.architecture])
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges([f"{bytes_[0]} {bytes_[1]}"])
    for name, size in _norms(config):
        writer.add_tensor_info(f"{name}.weight", (size,), np.dtype(np.float32), 4 * size)
    for name, outputs, inputs, kind in _matrices(config):
        weights, block = gguf.GGML_QUANT_SIZES[kind]
        shape = outputs, inputs // weights * block
        writer.add_tensor_info(f"{name}.weight", shape, np.dtype(np.uint8), shape[0] * shape[1], kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, size in _norms(config):
        writer.write_tensor_data(np.ones(size, np.float32))
    draw = np.random.default_rng(0)
    for _, outputs, inputs, kind in _matrices(config):
        weights, block = gguf.GGML_QUANT_SIZES[kind]
        blocks = draw.integers(0, 256, (outputs * inputs // weights, block), np.uint8)
        for first, factor in FACTORS[kind].items():
            blocks[:, first : first + 2] = np.frombuffer(np.float16(factor).tobytes(), np.uint8)
        writer.write_tensor_data(blocks.reshape(outputs, -1))
    writer.close()
