"""Qwen 3: Llama's layer, with every head's query and key normalised."""

from __future__ import annotations

from common.models.config import LayerConfig
from common.models.layers import CausalLM, DecoderLayer, QKNormAttention
from common.models.llama import LlamaLayer


class Qwen3(CausalLM):
    def make_layer(self, layer: LayerConfig, index: int) -> DecoderLayer:
        return LlamaLayer(self.config, QKNormAttention(self.config, layer, index, self.dtype), self.dtype)
