"""Mistral: Llama, where all layers may see only a sliding window of the latest tokens (as in the first version)."""

from __future__ import annotations

from common.models.config import ConfigReader, LayerConfig, ModelConfig
from common.models.llama import Llama


class Mistral(Llama):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> ModelConfig:
        layer = LayerConfig(reader.window(), reader.rope())
        return reader.model(layers=(layer,) * reader.num_layers(), max_position_embeddings=131_072)
