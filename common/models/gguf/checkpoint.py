"""Opens GGUF files as checkpoints: turns metadata into a `config.json` object, and reads tensors into parameters.

Llama and Mistral (llama.cpp calls both `llama`), Qwen 2 and 3 and Gemma 3 are read. llama.cpp's converter
interleaves rows of queries and keys (Llama, Mistral), and adds 1 to the weights of Gemma's norms. Both changes are
undone.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from common.errors import StartupError
from common.models.checkpoint import Checkpoint
from common.models.config import JsonObject, ModelConfig
from common.models.gguf.file import PLAIN, GGUFFile, GGUFTensor
from common.models.gguf.groups import KINDS
from common.models.gguf.tokenizer import GGUFVocabulary
from common.models.layers import CausalLM
from common.models.loader import WhenRead, fill_from
from common.models.tokenizer_files import gguf_tokenizer
from common.text.tokenizer import Tokenizer
from kernels.grouped import Form

#: The name of an architecture in GGUF files -> its `model_type`. A `llama` with a window becomes `mistral`.
_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_NAMES = {
    **_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}

#: Entries that would change what is computed, and that no model of these architectures needs.
_REFUSED = (
    "expert_count",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
)

#: Recommended sampling parameters, `general.sampling.*` -> their names in a `generation_config.json`, from which
#: llama.cpp's converter takes them.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}

_ROPE_DIVISORS = "rope_freqs.weight"


class GGUFCheckpoint(Checkpoint):
    """A checkpoint in a GGUF file."""

    def __init__(self, name: str, config: ModelConfig, file: GGUFFile) -> None:
        super().__init__(name, config)
        self.file = file
        quantized = [tensor for tensor in file.tensors.values() if tensor.kind not in PLAIN]
        if quantized:
            kinds = Counter(tensor.kind for tensor in quantized).most_common()
            count = sum(math.prod(tensor.shape) for tensor in quantized)
            bits = 8 * sum(tensor.num_bytes for tensor in quantized) / count
            self.quantization = f"{' and '.join(kind for kind, _ in kinds)}, {bits:.1f} bits a weight"
        self.vocabulary = GGUFVocabulary(file)

    def form_of(self, name: str) -> Form | None:
        tensor = self.file.tensors.get(self._spelled(name))
        return KINDS[tensor.kind].form if tensor and tensor.kind in KINDS else None

    def _spelled(self, name: str) -> str:
        return _spelled(name, _GEMMA_NAMES if self.config.architecture == "gemma3_text" else _NAMES)

    def fill(self, model: CausalLM, device: torch.device, keep_groups: bool, when_read: WhenRead) -> None:
        stored = {
            name: _undone(name, tensor, model.config)
            for name, tensor in self.file.tensors.items()
            if name != _ROPE_DIVISORS
        }
        fill_from(
            model,
            stored,
            device,
            when_read,
            origin=self.file.path,
            shapes="metadata",
            spelled=self._spelled,
            form_of=self.form_of if keep_groups else None,
        )
        model.stored_as = self.quantization if keep_groups else None

    def tokenizer(self, chat_template: Path | None = None) -> Tokenizer:
        return gguf_tokenizer(
            self.vocabulary, self.file.path, vocab_size=self.config.vocab_size, chat_template=chat_template
        )


def _spelled(name: str, names: dict[str, str]) -> str:
    """Return a tensor's name in GGUF files, from its name in Hugging Face checkpoints."""
    stem, _, kind = name.rpartition(".")  # kind: weight or bias
    if stem.startswith("model.layers."):
        index, _, stem = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{index}.{names[stem]}.{kind}"
    return f"{names[stem]}.{kind}"


def _undone(name: str, tensor: GGUFTensor, config: ModelConfig) -> GGUFTensor:
    """Return the tensor with a note of the change, if any, that llama.cpp's converter made, for `read_into`."""
    if config.architecture in ("llama", "mistral") and ".attn_q." in name:
        return dataclasses.replace(tensor, heads=config.num_heads)
    if config.architecture in ("llama", "mistral") and ".attn_k." in name:
        return dataclasses.replace(tensor, heads=config.num_kv_heads)
    if name.endswith("norm.weight"):
        return dataclasses.replace(tensor, added=config.norm_offset)
    return tensor


# ---------------------------------------------------------------------- metadata to config.json


def sampling_of(file: GGUFFile) -> JsonObject:
    """Return the sampling parameters that a file recommends, as a `generation_config.json` object.

    Numbers are stored as float32, and are rounded to the six digits that float32 keeps: 0.95 stays 0.95.
    """
    found = {name: file.metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return {name: float(f"{x:.6g}") if isinstance(x, float) else x for name, x in found.items()}


def config_of(file: GGUFFile) -> dict[str, Any]:
    """Return a file's metadata as a `config.json` object, in the style of transformers 5.

    Raises:
        StartupError: the architecture is not implemented, or an entry is missing, invalid or not implemented, or
            contradicts the tensors.
    """
    architecture = str(file.metadata.get("general.architecture"))
    if architecture not in _MODEL_TYPES:
        raise StartupError(
            f"{file.path}: the architecture {architecture!r:.80} is not implemented; "
            f"{', '.join(_MODEL_TYPES)} are read"
        )
    vocabulary = GGUFVocabulary(file)
    shape = _Shape(file, architecture, vocabulary.num_tokens)
    shape.check()
    quantized = any(tensor.kind not in PLAIN for tensor in file.tensors.values())
    kinds = Counter(tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1)
    kind = "BF16" if quantized else kinds.most_common(1)[0][0]
    config = {
        "model_type": _MODEL_TYPES[architecture],
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.count("feed_forward_length"),
        "num_hidden_layers": shape.count("block_count"),
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.entry("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": shape.count("context_length"),
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": shape.rope(),
        "dtype": {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[kind],
        "eos_token_id": vocabulary.end_token_ids(),
    }
    if architecture == "gemma3":
        return {**config, **shape.gemma()}
    if (window := shape.entry("attention.sliding_window", None)) is not None:
        return {**config, "model_type": "mistral", "sliding_window": window}
    return config


class _Shape:
    """Reads the metadata entries of an architecture. Errors (StartupError) say which entry is at fault."""

    _REQUIRED = object()

    def __init__(self, file: GGUFFile, architecture: str, num_tokens: int) -> None:
        self._file = file
        self._architecture = architecture
        self.hidden_size = self.count("embedding_length")
        self.heads = self.count("attention.head_count")
        self.kv_heads = self.count("attention.head_count_kv", self.heads)
        self.head_dim = self.count("attention.key_length", self.hidden_size // self.heads)
        self.vocab_size = self.count("vocab_size", num_tokens)

    def _error(self, message: str) -> StartupError:
        return StartupError(f"{self._file.path}: {message}")

    def entry(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return an entry, or `default` if it is missing. StartupError: it is missing, and no default is given."""
        name = f"{self._architecture}.{key}"
        value = self._file.metadata.get(name, default)
        if value is self._REQUIRED:
            raise self._error(f"its metadata lacks {name}")
        return value

    def count(self, key: str, default: Any = _REQUIRED) -> int:
        value = self.entry(key, default)
        if type(value) is not int or value < 1:
            raise self._error(f"{self._architecture}.{key} must be a positive integer, not {value!r:.80}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.entry(key, default)
        if not isinstance(value, float) or not (value == 0.0 or 1e-30 < value < 1e30):
            raise self._error(f"{self._architecture}.{key} must be a number, not {value!r:.80}")
        return value

    def check(self) -> None:
        """Compare the metadata with the shapes of the tensors.

        The tensors are known to fit into the file. So absurd sizes in the metadata are refused before a model or a
        tokenizer is built from them.

        Raises:
            StartupError: metadata and shapes contradict each other, or an entry is not implemented.
        """
        layers = {name.split(".")[1] for name in self._file.tensors if name.startswith("blk.")}
        if self.count("block_count") != len(layers):
            raise self._error(
                f"{self._architecture}.block_count is {self.count('block_count')}, and there are tensors of "
                f"{len(layers)} layers"
            )
        expected = {
            "token_embd.weight": (self.vocab_size, self.hidden_size),
            "blk.0.attn_q.weight": (self.heads * self.head_dim, self.hidden_size),
            "blk.0.attn_k.weight": (self.kv_heads * self.head_dim, self.hidden_size),
            "blk.0.ffn_up.weight": (self.count("feed_forward_length"), self.hidden_size),
        }
        for name, made in expected.items():
            if name not in self._file.tensors:
                raise self._error(f"the tensors do not fit its metadata. missing: {name}")
            if (stored := self._file.tensors[name].shape) != made:
                raise self._error(f"{name} is {list(stored)}, its metadata makes it {list(made)}")
        same = {"attention.value_length": self.head_dim, "rope.dimension_count": self.head_dim}
        refused = dict.fromkeys(_REFUSED, 0)
        if self._architecture != "gemma3":
            refused["attention.scale"] = 0
        if self._architecture in ("qwen2", "qwen3"):
            refused["attention.sliding_window"] = 0
        for key, neutral in {**same, **refused}.items():
            if (value := self.entry(key, neutral)) != neutral:
                raise self._error(f"{self._architecture}.{key} = {value!r:.80} is not implemented")

    def rope(self) -> JsonObject:
        """Return the value of `rope_parameters` in a `config.json`, from the file's entries on rotary embeddings.

        A tensor with divisors, if the file has one, replaces the entries on scaling.

        Raises:
            StartupError: the scaling is not implemented, or the tensor has a wrong shape.
        """
        theta = {"rope_theta": self.entry("rope.freq_base", 10_000.0)}
        factor = self.number("rope.scaling.factor", self.number("rope.scale_linear", 0.0))
        kind = self.entry("rope.scaling.type", "linear")
        if kind not in ("none", "linear"):
            raise self._error(f"{self._architecture}.rope.scaling.type = {kind!r:.80} is not implemented")
        if _ROPE_DIVISORS in self._file.tensors:
            tensor = self._file.tensors[_ROPE_DIVISORS]
            if tensor.shape != (self.head_dim // 2,):
                raise self._error(
                    f"{_ROPE_DIVISORS} is {list(tensor.shape)}, its metadata makes it [{self.head_dim // 2}]"
                )
            divisors = torch.empty(tensor.shape)
            tensor.read_into(divisors)
            return {**theta, "rope_type": "divided", "divisors": divisors.tolist()}
        if kind == "linear" and factor not in (0.0, 1.0):
            return {**theta, "rope_type": "linear", "factor": factor}
        return {**theta, "rope_type": "default"}

    def query_pre_attn_scalar(self) -> float:
        """Return the number whose inverse square root scales Gemma's attention scores."""
        scale = self.number("attention.scale", 0.0)
        if scale == 0.0:
            # Unlike the other models, the largest (62 layers) does not scale by its head size. No entry says so.
            return self.hidden_size // self.heads if self.count("block_count") == 62 else self.head_dim
        found = scale**-2
        # The entry is in float32, so the whole number that it was made of comes back with a rounding error.
        return round(found) if math.isclose(found, round(found), rel_tol=1e-6) else found

    def gemma(self) -> JsonObject:
        """Return the entries that Gemma 3 adds to the `config.json` of `config_of`, or has in another form."""
        pattern = self.entry("attention.sliding_window_pattern", 6)
        kinds = {True: "sliding_attention", False: "full_attention"}
        return {
            "sliding_window": self.count("attention.sliding_window"),
            **(
                {"layer_types": [kinds[bool(sliding)] for sliding in pattern]}
                if isinstance(pattern, list)
                else {"sliding_window_pattern": pattern}
            ),
            "query_pre_attn_scalar": self.query_pre_attn_scalar(),
            "rope_parameters": {
                "full_attention": self.rope(),
                "sliding_attention": {"rope_theta": self.entry("rope.freq_base_swa", 10_000.0)},
            },
        }
