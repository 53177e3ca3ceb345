"""The shape of a model, read from a checkpoint's `config.json`.

Each architecture's file reads its own configs with a `ConfigReader`, in both styles: transformers 4.x
(`rope_theta`, `rope_scaling`, `torch_dtype`, `sliding_window_pattern`) and 5.x (`rope_parameters`, `dtype`,
`layer_types`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from common.errors import StartupError
from common.kv import KVShape
from common.models.compressed import read_scheme

#: Entries of `rope_parameters` (or `rope_scaling`) that are read. The last two are types of layers.
ROPE_ENTRIES = (
    *("rope_theta", "rope_type", "type", "factor", "low_freq_factor", "high_freq_factor"),
    *("original_max_position_embeddings", "full_attention", "sliding_attention"),
)

#: The largest sizes that are read. No model comes near them.
MOST, MOST_LAYERS, MOST_POSITIONS = 2**24, 1000, 2**31

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
    """A scaling of rotary embeddings: positions are divided by `factor` (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling of rotary embeddings: low frequencies are divided by `factor`, high frequencies are kept,
    and frequencies between them are interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class DividedFrequencies:
    """A scaling of rotary embeddings: frequency `i` is divided by `divisors[i]`.

    GGUF files hold Llama 3.1's scaling in this form.
    """

    divisors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | DividedFrequencies


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021): the base of its frequencies and how they are scaled."""

    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The settings of one layer that may differ from those of the model's other layers."""

    window: int | None  # number of latest columns (token positions) that attention sees; None: all
    rope: RopeConfig


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only transformer."""

    architecture: str  # the `model_type`: a key of `common.models.registry.ARCHITECTURES`
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
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # each head's query and key are normalised
    norm_offset: float  # norms multiply by weight + offset
    tie_word_embeddings: bool
    attention_scale: float
    dtype: torch.dtype
    eos_token_ids: frozenset[int]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def kv_shape(self, dtype: torch.dtype) -> KVShape:
        """Return the shape of one token's keys and values, which are stored as `dtype`."""
        group = self.num_heads // self.num_kv_heads
        return KVShape(self.num_layers, self.num_kv_heads, self.head_dim, dtype, group)


def kv_bytes(config: ModelConfig, tokens: int, dtype: torch.dtype) -> int:
    """Return the bytes of KV memory for `tokens` tokens: 2 × layers × kv_heads × head_dim × itemsize a token."""
    return config.kv_shape(dtype).bytes_per_token * tokens


class ConfigReader:
    """Reads the entries of a `config.json` object. Errors (StartupError) say which entry is at fault.

    Raises:
        StartupError: the checkpoint's weights are quantized in a way that is not implemented.
    """

    def __init__(self, raw: JsonObject) -> None:
        self.raw = raw
        read_scheme(raw)

    def get(self, key: str, default: Any) -> Any:
        """Return an entry, or `default` if it is absent or null."""
        value = self.raw.get(key)
        return default if value is None else value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise StartupError(f"{key} must be true or false, not {value!r:.80}")
        return value

    def positive_int(
        self, key: str, default: int | None = None, *, or_zero: bool = False, most: int = MOST
    ) -> int:
        """Return an integer of at most `most`, so that an absurd one is refused before memory is taken for it."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < (0 if or_zero else 1):
            raise StartupError(f"{key} must be a positive integer{' or 0' * or_zero}, not {value!r:.80}")
        if value > most:
            raise StartupError(f"{key} must be at most {most}, not {value!r:.80}")
        return value

    def num_layers(self) -> int:
        return self.positive_int("num_hidden_layers", most=MOST_LAYERS)

    def number(self, key: str, default: float | None = None) -> float:
        return _number(self.get(key, default), key)

    def window(self) -> int | None:
        """Return how many tokens sliding attention sees: 4096 if there is no entry, None (all) if it is null."""
        if self.raw.get("sliding_window", 4096) is None:
            return None
        return self.positive_int("sliding_window", 4096, most=MOST_POSITIONS)

    def dtype(self) -> torch.dtype:
        name = self.get("dtype", self.get("torch_dtype", "float32"))
        if not isinstance(name, str) or name not in _DTYPES:
            raise StartupError(f"dtype {name!r:.80} is not one of {', '.join(_DTYPES)}")
        return _DTYPES[name]

    def eos_token_ids(self) -> frozenset[int]:
        return token_id_set(self.raw.get("eos_token_id"))

    def rope(self, layer_type: str | None = None, theta: float = 10_000.0) -> RopeConfig:
        """Return the rotary embedding's settings.

        Args:
            layer_type: the type of the layers whose settings are returned. If the file has no separate settings
                for this type, the settings of all layers are returned.
            theta: the base if the file names none.
        """
        for key in ("rope_parameters", "rope_scaling"):
            if not isinstance(self.get(key, {}), Mapping):
                raise StartupError(f"{key} must be an object, not {self.raw[key]!r:.80}")
        parameters = self.raw.get("rope_parameters")
        if parameters is not None:
            if isinstance(parameters.get(layer_type), Mapping):
                parameters = parameters[layer_type]
            base = parameters.get("rope_theta", self.get("rope_theta", theta))
            return RopeConfig(_number(base, "rope_theta"), _scaling(parameters))
        return RopeConfig(self.number("rope_theta", theta), _scaling(self.raw.get("rope_scaling")))

    def refuse(self, key: str, neutral: tuple[Any, ...], why: str) -> None:
        """Raise StartupError if the value of an entry is not among `neutral`; `why` ends the message.

        An absent entry has the value None.
        """
        if self.raw.get(key) not in neutral:
            raise StartupError(f"{key} = {self.raw[key]!r:.80} is not implemented: {why}")

    def layers(
        self, full: LayerConfig, sliding: LayerConfig, is_sliding: Callable[[int], bool]
    ) -> tuple[LayerConfig, ...]:
        """Return the settings of all layers, first to last.

        The file's `layer_types` says which layers are of the type `full_attention`, and which `sliding_attention`.

        Args:
            full: the settings of each `full_attention` layer.
            sliding: the settings of each `sliding_attention` layer.
            is_sliding: takes a layer's index and returns whether the layer is of the type `sliding_attention`.
                Called only if the file has no `layer_types`.
        """
        count = self.num_layers()
        types = self.raw.get("layer_types")
        if types is None:
            types = ["sliding_attention" if is_sliding(i) else "full_attention" for i in range(count)]
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != count or any(kind not in known for kind in types):
            raise StartupError(
                f"layer_types must name full_attention or sliding_attention for each of {count} layers"
            )
        return tuple(full if kind == "full_attention" else sliding for kind in types)

    def model(
        self,
        *,
        layers: tuple[LayerConfig, ...],
        max_position_embeddings: int,
        head_dim: int | None = None,
        activation: str = "silu",
        qkv_bias: bool = False,
        o_bias: bool = False,
        mlp_bias: bool = False,
        qk_norm: bool = False,
        norm_offset: float = 0.0,
        tie_word_embeddings: bool = False,
        attention_scale: float | None = None,
    ) -> ModelConfig:
        """Return the model's config. Reads the entries that have the same names in all architectures.

        Each argument is a setting that the architecture has read itself, or its default for an absent entry.
        """
        heads = self.positive_int("num_attention_heads")
        kv_heads = self.positive_int("num_key_value_heads", heads)
        if heads % kv_heads:
            raise StartupError(
                f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
            )
        hidden_size = self.positive_int("hidden_size")
        head_dim = self.positive_int("head_dim", head_dim or hidden_size // heads)
        if head_dim % 2:
            raise StartupError(f"head_dim must be even, for rotary embeddings, not {head_dim}")
        name = str(self.raw.get("hidden_act", self.raw.get("hidden_activation")) or activation)
        if name not in _ACTIVATIONS:
            raise StartupError(f"hidden_act {name!r:.80} is not one of {', '.join(_ACTIVATIONS)}")
        return ModelConfig(
            architecture=self.raw["model_type"],
            vocab_size=self.positive_int("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self.positive_int("intermediate_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            layers=layers,
            rms_norm_eps=self.number("rms_norm_eps", 1e-6),
            max_position_embeddings=self.positive_int(
                "max_position_embeddings", max_position_embeddings, most=MOST_POSITIONS
            ),
            activation=_ACTIVATIONS[name],
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            mlp_bias=mlp_bias,
            qk_norm=qk_norm,
            norm_offset=norm_offset,
            tie_word_embeddings=self.flag("tie_word_embeddings", tie_word_embeddings),
            attention_scale=attention_scale or head_dim**-0.5,
            dtype=self.dtype(),
            eos_token_ids=self.eos_token_ids(),
        )


def token_id_set(value: Any) -> frozenset[int]:
    """Return the value of an entry `eos_token_id` as a set. The value is null, one token id, or a list of ids.

    Raises:
        StartupError: `value` is something else.
    """
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise StartupError(f"eos_token_id must be a token id or a list of them, not {value!r:.80}")
    return frozenset(ids)


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise StartupError(f"{key} must be a positive number, not {value!r:.80}")
    return float(value)


def _scaling(parameters: Any) -> RopeScaling | None:
    if parameters is None:
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
        case "divided":  # written by `common.models.gguf.checkpoint` only
            divisors = parameters.get("divisors")
            if not isinstance(divisors, list):
                raise StartupError(f"rope divisors must be a list, not {divisors!r:.80}")
            return DividedFrequencies(tuple(_number(each, "rope divisors") for each in divisors))
        case _:
            raise StartupError(
                f"rope_type {kind!r:.80} is not one of default, linear, llama3: where it was added to stretch the "
                "context, take it out and serve sequences no longer than the model was trained on"
            )
