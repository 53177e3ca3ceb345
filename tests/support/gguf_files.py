"""Writes small GGUF files as llama.cpp's converter does, from a Hugging Face folder and a tokenizer of the zoo."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
from safetensors.torch import load_file
from torch import Tensor

from tests.support.models import read_config, zoo

#: The name of each architecture in GGUF. llama.cpp has none for Mistral.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}
UNKNOWN, CONTROL, BYTE = 2, 3, 6


def save_gguf(
    source: Path,
    target: Path,
    kind: str | Callable[[str], str] = "F32",
    *,
    tokenizer: str = "llama-tiny",
    change: Callable[[gguf.GGUFWriter, dict[str, Tensor]], object] = lambda writer, tensors: None,
    **entries: Any,
) -> Path:
    """Write a checkpoint as a GGUF file.

    Args:
        source: the checkpoint's folder.
        kind: the type of its matrices, or a function of their names in GGUF.
        tokenizer: a model of the zoo, whose first tokens become the file's.
        change: called before the file is written, with the tensors by their names in GGUF, not yet interleaved.
        entries: further metadata of the architecture, with `__` for `.`; None leaves an entry out.
    """
    config = read_config(source)
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(target, architecture)
    metadata = _metadata(config) | {key.replace("__", "."): value for key, value in entries.items()}
    for key, value in metadata.items():
        if value is not None:
            add_entry(writer, f"{architecture}.{key}", value)
    add_tokenizer(writer, tokenizer, config["vocab_size"])
    tensors = _renamed(load_file(source / "model.safetensors"), architecture, config["num_hidden_layers"])
    if architecture == "gemma3":
        tensors = {n: t + 1.0 if n.endswith("norm.weight") else t for n, t in tensors.items()}
    change(writer, tensors)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in tensors.items():
        part = name.split(".")[-2]
        if architecture == "llama" and part in heads:
            tensor = interleaved(tensor, heads[part])
        named = kind if isinstance(kind, str) else kind(name)
        stored = gguf.GGMLQuantizationType[named if tensor.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quantize(tensor.numpy(), stored), raw_dtype=stored)
    finish(writer)
    return target


def finish(writer: gguf.GGUFWriter) -> None:
    """Write everything that was added, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_entry(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    add.get(type(value), writer.add_array)(key, value)


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    gemma = config["model_type"] == "gemma3_text"
    rope = config["rope_parameters"]
    windowed = gemma or config["model_type"] == "mistral"
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": (rope["full_attention"] if gemma else rope)["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"] if gemma else None,
        "attention.sliding_window": config["sliding_window"] if windowed else None,
        "attention.sliding_window_pattern": (
            [kind == "sliding_attention" for kind in config["layer_types"]] if gemma else None
        ),
        "attention.scale": config["query_pre_attn_scalar"] ** -0.5 if gemma else None,
    }


def add_tokenizer(writer: gguf.GGUFWriter, name: str, vocab_size: int | None = None, **replaced: Any) -> None:
    """Write the tokenizer of a model of the zoo, or the first tokens of it."""
    own = json.loads((zoo(name) / "tokenizer.json").read_text())
    special = {token["content"]: token["id"] for token in own["added_tokens"]}
    ids = own["model"]["vocab"] | special
    tokens = sorted(ids, key=ids.__getitem__)[:vocab_size]
    kinds = [CONTROL if token in special else BYTE if token.startswith("<0x") else 1 for token in tokens]
    entries = {
        "model": "llama" if own["model"]["byte_fallback"] else "gpt2",
        "pre": "default" if own["model"]["byte_fallback"] else "gpt-2",
        "tokens": tokens,
        "token_type": kinds,
        "add_space_prefix": False,
        "merges": None
        if own["model"]["byte_fallback"]
        else [" ".join(pair) for pair in own["model"]["merges"]],
    }
    if vocab_size is not None and vocab_size < len(ids):
        entries["merges"] = []
    for key, value in (entries | replaced).items():
        if value is not None and value != []:
            add_entry(writer, f"tokenizer.ggml.{key}", value)


def _renamed(tensors: dict[str, Tensor], architecture: str, layers: int) -> dict[str, Tensor]:
    """Name tensors as the official library's table does."""
    (known,) = (key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    table = gguf.get_tensor_name_map(known, layers)
    names = {name: name.rpartition(".") for name in tensors}
    return {
        f"{table.get_name(stem)}.{kind}": tensors[name].float() for name, (stem, _, kind) in names.items()
    }


def interleaved(tensor: Tensor, heads: int) -> Tensor:
    """The rows of each head in the order 0, d/2, 1, d/2 + 1, ..., as in llama.cpp's converter."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape).contiguous()
