"""Mistral: Llama. In its first version, every layer sees a window of the latest tokens."""

from __future__ import annotations

from common.models.config import ConfigReader, LayerConfig, ModelConfig
from common.models.llama import Llama


class Mistral(Llama):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> ModelConfig:
        no_window = reader.raw.get("sliding_window", 4096) is None
        layer = LayerConfig(None if no_window else reader.positive_int("sliding_window", 4096), reader.rope())
        layers = (layer,) * reader.positive_int("num_hidden_layers")
        return reader.model(layers=layers, max_position_embeddings=131_072)
