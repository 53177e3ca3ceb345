"""Gemma 3: norms on both sides of attention and MLP, norms that multiply by `1 + weight`, scaled embeddings.

Most layers see a sliding window of the latest tokens, and their rotary embedding has a small base. Usually every
sixth layer sees all tokens, with a large base (see `ModelConfig.layers`).

Multimodal checkpoints (`Gemma3ForConditionalGeneration`) also hold a model for images, which is not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from common.errors import StartupError
from common.kv import KVView
from common.models.config import ConfigReader, LayerConfig, ModelConfig, RopeConfig
from common.models.layers import Attention, CausalLM, GatedMLP, RMSNorm

# Published multimodal checkpoints omit these entries from `text_config` if they have transformers' defaults.
_TEXT_DEFAULTS = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4}


class Gemma3Layer(nn.Module):
    """A layer: norm, attention, norm, add; norm, MLP, norm, add."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config, dtype)

        self.input_layernorm = norm()
        self.self_attn = Attention(config, layer, index, dtype)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = GatedMLP(config, dtype)
        self.post_feedforward_layernorm = norm()

    def forward(
        self, hidden: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, view: KVView
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self.input_layernorm.add_and_norm(hidden, residual)
        hidden = self.post_attention_layernorm(self.self_attn(hidden, cos, sin, view))
        hidden, residual = self.pre_feedforward_layernorm.add_and_norm(hidden, residual)
        return self.post_feedforward_layernorm(self.mlp(hidden)), residual


class Gemma3(CausalLM):
    layer_type = Gemma3Layer
    # Multimodal checkpoints have `language_model` either outside or inside `model`.
    renamed_prefixes: ClassVar[Mapping[str, str]] = {
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
        "model.language_model.": "model.",
    }
    skipped_prefixes = (
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    )

    @classmethod
    def read_config(cls, reader: ConfigReader) -> ModelConfig:
        if reader.raw["model_type"] == "gemma3":
            reader = _text_of(reader)
        reader.refuse("attn_logit_softcapping", (None,), "Gemma 3 has none")
        reader.refuse("final_logit_softcapping", (None,), "Gemma 3 has none")
        reader.refuse("use_bidirectional_attention", (None, False), "this is a causal language model")
        full = LayerConfig(None, reader.rope("full_attention", theta=1_000_000.0))
        if isinstance(reader.raw.get("rope_parameters"), Mapping):
            local = reader.rope("sliding_attention")
        else:  # transformers 4.x: `rope_scaling` applies to the layers without a window
            local = RopeConfig(reader.number("rope_local_base_freq", 10_000.0))
        sliding = LayerConfig(reader.positive_int("sliding_window", 4096), local)
        pattern = reader.positive_int("sliding_window_pattern", 6)
        bias = reader.flag("attention_bias")
        return reader.model(
            layers=reader.layers(full, sliding, lambda index: (index + 1) % pattern != 0),
            max_position_embeddings=131_072,
            head_dim=256,
            activation="gelu_pytorch_tanh",
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=True,
            norm_offset=1.0,
            tie_word_embeddings=True,
            attention_scale=reader.number("query_pre_attn_scalar", 256) ** -0.5,
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        # The factor is rounded to the model's type, as in training.
        scale = torch.tensor(self.config.hidden_size**0.5, dtype=self.dtype)
        return super().embed(token_ids) * scale


def _text_of(reader: ConfigReader) -> ConfigReader:
    """Return the config of a multimodal checkpoint's language model.

    It has the entries of `text_config`, and `_TEXT_DEFAULTS` for absent entries. Four entries may also stand beside
    `text_config`, and then replace the entries in it.

    Raises:
        StartupError: there is no `text_config`.
    """
    text = reader.raw.get("text_config")
    if not isinstance(text, Mapping):
        raise StartupError(f"text_config must be the language model's own config, not {text!r}")
    outside = {
        key: reader.raw[key]
        for key in ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")
        if reader.raw.get(key) is not None
    }
    return ConfigReader({**_TEXT_DEFAULTS, **text, **outside, "model_type": "gemma3_text"})
