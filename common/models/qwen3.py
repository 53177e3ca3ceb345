"""Qwen 3: Llama, with every head's query and key normalised."""

from __future__ import annotations

from common.models.config import ConfigReader, ModelConfig
from common.models.llama import Llama
from common.models.qwen2 import read_layers


class Qwen3(Llama):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> ModelConfig:
        bias = reader.flag("attention_bias")
        return reader.model(
            layers=read_layers(reader),
            max_position_embeddings=32_768,
            head_dim=128,
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=True,
        )
