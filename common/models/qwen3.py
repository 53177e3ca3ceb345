"""Qwen 3: Llama's block, with every head's query and key normalised."""

from __future__ import annotations

from common.models.config import LayerConfig
from common.models.layers import CausalLM, DecoderBlock, QKNormAttention
from common.models.llama import LlamaBlock


class Qwen3(CausalLM):
    def make_block(self, layer: LayerConfig, index: int) -> DecoderBlock:
        return LlamaBlock(self.config, QKNormAttention(self.config, layer, index, self.dtype), self.dtype)
