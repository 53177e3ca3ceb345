"""A checkpoint's `config.json`, read into the one form that our models understand.

Both styles in use are read: that of transformers 4.x (`rope_theta`, `rope_scaling`, `torch_dtype`,
`sliding_window_pattern`) and that of 5.x (`rope_parameters`, `dtype`, `layer_types`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from common.errors import StartupError

Architecture = Literal["llama", "qwen3", "gemma3_text"]
Activation = Literal["silu", "gelu_tanh"]
JsonObject = Mapping[str, Any]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023, position interpolation)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, a ramp between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021): the base of its frequencies and how they are scaled."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | None = None


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What differs from layer to layer: how far attention sees, and the rotary embedding it uses."""

    window: int | None
    rope: RopeConfig


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only transformer."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    rms_norm_eps: float
    max_position_embeddings: int
    activation: Activation
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    attention_scale: float
    dtype: torch.dtype
    eos_token_ids: frozenset[int]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @classmethod
    def from_json(cls, raw: JsonObject) -> ModelConfig:
        """Read a `config.json` object.

        Raises:
            StartupError: an architecture we do not implement, a missing or contradictory entry. It names the
                entry; whoever read the file adds its name.
        """
        model_type = raw.get("model_type")
        reader = _READERS.get(str(model_type))
        if reader is None:
            raise StartupError(
                f"model_type {model_type!r} is not implemented; this server runs {', '.join(_READERS)}"
            )
        quantization = raw.get("quantization_config")
        if quantization is not None:
            method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
            raise StartupError(
                f"quantization_config: the weights are quantized ({method or 'by a method it does not name'}), "
                f"and only {', '.join(_DTYPES)} weights are run: take the checkpoint that this one was made from"
            )
        return reader(_Reader(raw))


class _Reader:
    """Named access to a `config.json` object, with errors that say which entry is at fault."""

    def __init__(self, raw: JsonObject) -> None:
        self.raw = raw

    def get(self, key: str, default: Any) -> Any:
        """The entry, or `default` where it is absent or null."""
        value = self.raw.get(key)
        return default if value is None else value

    def positive_int(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise StartupError(f"{key} must be a positive integer, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return _number(self.get(key, default), key)

    def dtype(self) -> torch.dtype:
        name = self.get("dtype", self.get("torch_dtype", "float32"))
        if not isinstance(name, str) or name not in _DTYPES:
            raise StartupError(f"dtype {name!r} is not one of {', '.join(_DTYPES)}")
        return _DTYPES[name]

    def eos_token_ids(self) -> frozenset[int]:
        return token_id_set(self.raw.get("eos_token_id"))

    def rope(self, layer_type: str | None = None) -> RopeConfig:
        """The rotary embedding, of one layer type where the file holds one per type."""
        parameters = self.raw.get("rope_parameters")
        if isinstance(parameters, Mapping):
            if isinstance(parameters.get(layer_type), Mapping):
                parameters = parameters[layer_type]
            theta = parameters.get("rope_theta", self.get("rope_theta", 10_000.0))
            return RopeConfig(_number(theta, "rope_theta"), _scaling(parameters))
        return RopeConfig(self.number("rope_theta", 10_000.0), _scaling(self.raw.get("rope_scaling")))

    def refuse(self, key: str, neutral: tuple[Any, ...], why: str) -> None:
        if self.raw.get(key) not in neutral:
            raise StartupError(f"{key} = {self.raw[key]!r} is not implemented: {why}")

    def decoder(
        self,
        *,
        architecture: Architecture,
        layers: tuple[LayerConfig, ...],
        activation: str,
        tie_word_embeddings: bool,
        max_position_embeddings: int,
        head_dim: int | None = None,
        attention_scale: float | None = None,
    ) -> ModelConfig:
        """The entries that all architectures name alike; the arguments are what an architecture settles itself."""
        heads = self.positive_int("num_attention_heads")
        kv_heads = self.positive_int("num_key_value_heads", heads)
        if heads % kv_heads:
            raise StartupError(
                f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
            )
        hidden_size = self.positive_int("hidden_size")
        head_dim = self.positive_int("head_dim", head_dim or hidden_size // heads)
        name = str(self.raw.get("hidden_act", self.raw.get("hidden_activation")) or activation)
        if name not in _ACTIVATIONS:
            raise StartupError(f"hidden_act {name!r} is not one of {', '.join(_ACTIVATIONS)}")
        return ModelConfig(
            architecture=architecture,
            vocab_size=self.positive_int("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self.positive_int("intermediate_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            layers=layers,
            rms_norm_eps=self.number("rms_norm_eps", 1e-6),
            max_position_embeddings=self.positive_int("max_position_embeddings", max_position_embeddings),
            activation=_ACTIVATIONS[name],
            attention_bias=bool(self.get("attention_bias", False)),
            mlp_bias=bool(self.get("mlp_bias", False)),
            tie_word_embeddings=bool(self.get("tie_word_embeddings", tie_word_embeddings)),
            attention_scale=attention_scale or head_dim**-0.5,
            dtype=self.dtype(),
            eos_token_ids=self.eos_token_ids(),
        )


def token_id_set(value: Any) -> frozenset[int]:
    """EOS ids as `config.json` and `generation_config.json` write them: null, one id, or a list.

    Raises:
        StartupError: anything else.
    """
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise StartupError(f"eos_token_id must be a token id or a list of them, not {value!r}")
    return frozenset(ids)


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise StartupError(f"{key} must be a positive number, not {value!r}")
    return float(value)


def _scaling(parameters: Any) -> LinearScaling | Llama3Scaling | None:
    if not isinstance(parameters, Mapping):
        return None
    kind = parameters.get("rope_type", parameters.get("type", "default"))

    def entry(key: str) -> float:
        return _number(parameters.get(key), f"rope {key}")

    match kind:
        case "default" | None:
            return None
        case "linear":
            return LinearScaling(entry("factor"))
        case "llama3":
            return Llama3Scaling(
                factor=entry("factor"),
                low_freq_factor=entry("low_freq_factor"),
                high_freq_factor=entry("high_freq_factor"),
                original_max_position_embeddings=int(entry("original_max_position_embeddings")),
            )
        case _:
            raise StartupError(
                f"rope_type {kind!r} is not one of default, linear, llama3: where it was added to stretch the "
                "context, take it out and serve sequences no longer than the model was trained on"
            )


def _read_llama(reader: _Reader) -> ModelConfig:
    layer = LayerConfig(window=None, rope=reader.rope())
    return reader.decoder(
        architecture="llama",
        layers=(layer,) * reader.positive_int("num_hidden_layers"),
        activation="silu",
        tie_word_embeddings=False,
        max_position_embeddings=2048,
    )


def _read_qwen3(reader: _Reader) -> ModelConfig:
    reader.refuse("use_sliding_window", (None, False), "Qwen 3 checkpoints use full attention")
    layer = LayerConfig(window=None, rope=reader.rope())
    return reader.decoder(
        architecture="qwen3",
        layers=(layer,) * reader.positive_int("num_hidden_layers"),
        activation="silu",
        tie_word_embeddings=False,
        max_position_embeddings=32_768,
        head_dim=128,
    )


def _read_gemma3(reader: _Reader) -> ModelConfig:
    reader.refuse("attn_logit_softcapping", (None,), "Gemma 3 has none")
    reader.refuse("final_logit_softcapping", (None,), "Gemma 3 has none")
    reader.refuse("use_bidirectional_attention", (None, False), "this is a causal language model")
    count = reader.positive_int("num_hidden_layers")
    window = reader.positive_int("sliding_window", 4096)
    types = reader.raw.get("layer_types")
    if types is None:  # 4.x: every n-th layer is global
        pattern = reader.positive_int("sliding_window_pattern", 6)
        types = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(count)]
    if len(types) != count or not set(types) <= {"full_attention", "sliding_attention"}:
        raise StartupError(
            f"layer_types must name full_attention or sliding_attention for each of {count} layers"
        )
    if isinstance(reader.raw.get("rope_parameters"), Mapping):
        local, full = reader.rope("sliding_attention"), reader.rope("full_attention")
    else:  # 4.x: rope_scaling is the global layers' alone
        local = RopeConfig(reader.number("rope_local_base_freq", 10_000.0))
        full = RopeConfig(reader.number("rope_theta", 1_000_000.0), _scaling(reader.raw.get("rope_scaling")))
    by_type = {
        "sliding_attention": LayerConfig(window=window, rope=local),
        "full_attention": LayerConfig(window=None, rope=full),
    }
    return reader.decoder(
        architecture="gemma3_text",
        layers=tuple(by_type[kind] for kind in types),
        activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        max_position_embeddings=131_072,
        head_dim=256,
        attention_scale=reader.number("query_pre_attn_scalar", 256) ** -0.5,
    )


# Published multimodal checkpoints leave these out of `text_config` where they equal transformers' defaults.
_GEMMA3_DEFAULTS = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4}


def _read_multimodal_gemma3(reader: _Reader) -> ModelConfig:
    """The language model of a `Gemma3ForConditionalGeneration`. Some of its entries stand outside `text_config`."""
    text = reader.raw.get("text_config")
    if not isinstance(text, Mapping):
        raise StartupError(f"text_config must be the language model's own config, not {text!r}")
    shared = {
        key: reader.raw[key]
        for key in ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")
        if reader.raw.get(key) is not None
    }
    return ModelConfig.from_json({**_GEMMA3_DEFAULTS, **text, **shared, "model_type": "gemma3_text"})


_READERS = {
    "llama": _read_llama,
    "qwen3": _read_qwen3,
    "gemma3_text": _read_gemma3,
    "gemma3": _read_multimodal_gemma3,
}
