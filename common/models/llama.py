"""Llama 3: the plain pre-norm decoder. The other architectures are variants of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from common.kv import KVView
from common.models.config import ConfigReader, LayerConfig, ModelConfig
from common.models.layers import Attention, CausalLM, GatedMLP, RMSNorm


class LlamaLayer(nn.Module):
    """A layer: norm, attention, add; norm, MLP, add. Each addition is fused with the norm that follows it.

    The norm after the layer's last addition is the next layer's first norm, or the model's last one.
    """

    def __init__(self, config: ModelConfig, layer: LayerConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config, dtype)
        self.self_attn = Attention(config, layer, index, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config, dtype)
        self.mlp = GatedMLP(config, dtype)

    def forward(
        self, hidden: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, view: KVView
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self.input_layernorm.add_and_norm(hidden, residual)
        hidden = self.self_attn(hidden, cos, sin, view)
        hidden, residual = self.post_attention_layernorm.add_and_norm(hidden, residual)
        return self.mlp(hidden), residual


class Llama(CausalLM):
    layer_type = LlamaLayer

    @classmethod
    def read_config(cls, reader: ConfigReader) -> ModelConfig:
        layer = LayerConfig(None, reader.rope())
        bias = reader.flag("attention_bias")
        return reader.model(
            layers=(layer,) * reader.num_layers(),
            max_position_embeddings=2048,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=reader.flag("mlp_bias"),
        )
