"""Qwen 2 and 2.5: Llama, with a bias on queries, keys and values."""

from __future__ import annotations

from common.models.config import ConfigReader, LayerConfig, ModelConfig
from common.models.llama import Llama


def read_layers(reader: ConfigReader) -> tuple[LayerConfig, ...]:
    """Return the settings of a Qwen model's layers.

    If `use_sliding_window` is set, some layers have a sliding window: the layers that `layer_types` names or,
    without that entry, the layers from index `max_window_layers` on.
    """
    rope = reader.rope()
    window = reader.window() if reader.flag("use_sliding_window") else None
    first = reader.positive_int("max_window_layers", 28, or_zero=True)
    return reader.layers(LayerConfig(None, rope), LayerConfig(window, rope), lambda index: index >= first)


class Qwen2(Llama):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> ModelConfig:
        return reader.model(layers=read_layers(reader), max_position_embeddings=32_768, qkv_bias=True)
