"""Llama 3: the plain pre-norm decoder that the others vary."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from common.kv import KVView
from common.models.config import LayerConfig, ModelConfig
from common.models.layers import Attention, CausalLM, DecoderLayer, GatedMLP, HeldTensor, RMSNorm


class LlamaLayer(DecoderLayer):
    """norm, attention, add; norm, MLP, add. Each addition is fused with the norm that follows it."""

    def __init__(self, config: ModelConfig, attention: Attention, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = attention
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = GatedMLP(config, dtype)

    def forward(
        self, hidden: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, view: KVView
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self.input_norm.add_and_norm(hidden, residual)
        hidden = self.attention(hidden, cos, sin, view)
        hidden, residual = self.post_attention_norm.add_and_norm(hidden, residual)
        return self.mlp(hidden), residual

    def held_tensors(self, prefix: str) -> Iterator[HeldTensor]:
        yield from self.input_norm.held_tensors(f"{prefix}input_layernorm")
        yield from self.attention.held_tensors(f"{prefix}self_attn.")
        yield from self.post_attention_norm.held_tensors(f"{prefix}post_attention_layernorm")
        yield from self.mlp.held_tensors(f"{prefix}mlp.")


class Llama(CausalLM):
    def make_layer(self, layer: LayerConfig, index: int) -> DecoderLayer:
        return LlamaLayer(self.config, Attention(self.config, layer, index, self.dtype), self.dtype)
