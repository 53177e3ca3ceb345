"""Gemma 3: norms on both sides of attention and MLP, weights stored as `w` of `1 + w`, scaled embeddings.

Most layers see a sliding window of the latest tokens and rotate by a small base; every few layers one sees
everything and rotates by a large one (both are in `ModelConfig.layers`).

Multimodal checkpoints (`Gemma3ForConditionalGeneration`) hold this model and one for images, which is not loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from common.kv import KVView
from common.models.config import LayerConfig, ModelConfig
from common.models.layers import CausalLM, DecoderLayer, GatedMLP, HeldTensor, QKNormAttention, RMSNorm

OFFSET = 1.0


class Gemma3Layer(DecoderLayer):
    """norm, attention, norm, add; norm, MLP, norm, add."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, OFFSET)

        self.input_norm = norm()
        self.attention = QKNormAttention(config, layer, index, dtype, OFFSET)
        self.post_attention_norm = norm()
        self.pre_mlp_norm = norm()
        self.mlp = GatedMLP(config, dtype)
        self.post_mlp_norm = norm()

    def forward(
        self, hidden: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, view: KVView
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self.input_norm.add_and_norm(hidden, residual)
        hidden = self.post_attention_norm(self.attention(hidden, cos, sin, view))
        hidden, residual = self.pre_mlp_norm.add_and_norm(hidden, residual)
        return self.post_mlp_norm(self.mlp(hidden)), residual

    def held_tensors(self, prefix: str) -> Iterator[HeldTensor]:
        yield from self.input_norm.held_tensors(f"{prefix}input_layernorm")
        yield from self.attention.held_tensors(f"{prefix}self_attn.")
        yield from self.post_attention_norm.held_tensors(f"{prefix}post_attention_layernorm")
        yield from self.pre_mlp_norm.held_tensors(f"{prefix}pre_feedforward_layernorm")
        yield from self.mlp.held_tensors(f"{prefix}mlp.")
        yield from self.post_mlp_norm.held_tensors(f"{prefix}post_feedforward_layernorm")


class Gemma3(CausalLM):
    norm_offset = OFFSET
    # Multimodal checkpoints are written in two ways, with `language_model` outside or inside `model`.
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

    def make_layer(self, layer: LayerConfig, index: int) -> DecoderLayer:
        return Gemma3Layer(self.config, layer, index, self.dtype)

    def embed(self, token_ids: Tensor) -> Tensor:
        # The factor is rounded to the weights' type, as it was in training.
        scale = torch.tensor(self.config.hidden_size**0.5, dtype=self.dtype)
        return super().embed(token_ids) * scale
