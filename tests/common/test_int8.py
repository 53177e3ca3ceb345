"""`--quantize int8` and `int4`. Checkpoints that are quantized already are in `test_packed.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import common.models.layers
import common.startup.build
import common.startup.memory
from common.errors import StartupError
from common.models.layers import CausalLM
from common.models.registry import weight_bytes
from common.startup.phases import find_phase
from kernels.grouped import grouped_linear_reference
from kernels.int8 import quantize
from tests.support.models import draw_ids, largest_difference, load, save_tiny, solo_logits

IDS = draw_ids(40)


def dequantized(model: CausalLM) -> CausalLM:
    """Quantize a model's weights, and write them back dequantized, in the model's type."""
    for module in model.modules():
        if isinstance(module, common.models.layers.Linear):
            values, scales = quantize(module.weight)
            module.weight.data.copy_(values * scales)  # a tied embedding is the head's weight
    return model


# ---------------------------------------------------------------------- a model


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3_text"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_a_quantized_model_computes_what_its_rounded_weights_do(
    architecture: str, tied: bool, packed: bool, tmp_path: Path
) -> None:
    save_tiny(tmp_path, architecture, tie_word_embeddings=tied or architecture == "gemma3_text")
    model, rounded = load(tmp_path), dequantized(load(tmp_path))
    model.quantize()
    if packed:
        model.pack()
    assert model.is_quantized
    assert model.weight_dtype == torch.int8
    expected = solo_logits(rounded, IDS)
    assert largest_difference(solo_logits(model, IDS), expected) < 1e-4 * expected.abs().max().item()


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_of_four_bits_computes_what_its_dequantized_weights_do(tied: bool, tmp_path: Path) -> None:
    # The inputs of `down_proj` are no whole groups.
    save_tiny(tmp_path, "llama", hidden_size=96, tie_word_embeddings=tied)
    model, rounded = load(tmp_path), load(tmp_path)
    model.quantize("int4")
    for layer, twin in zip(model.linear_layers(), rounded.linear_layers(), strict=True):
        if layer.layout is None:
            assert layer.weight.dtype == torch.int8
            twin.weight.data.copy_(layer.weight * layer.weight_scale)
        else:
            unit = torch.eye(layer.in_features)
            twin.weight.data.copy_(grouped_linear_reference(unit, layer.weight, layer.layout).T)
    assert model.weight_dtype == "int4"
    assert sum(each.nbytes for each in model.parameters()) == weight_bytes(
        model.config, torch.float32, quantized="int4"
    )
    expected = solo_logits(rounded, IDS)
    for prepare in (lambda: None, model.pack):
        prepare()
        assert largest_difference(solo_logits(model, IDS), expected) < 1e-4 * expected.abs().max().item()


# ---------------------------------------------------------------------- a server's engine


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantizing_is_refused_on_cuda(quantize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common.startup.build, "resolve_device", lambda _: torch.device("cuda"))
    package = find_phase("static")
    with pytest.raises(StartupError, match=f"{quantize} weights are for a CPU") as refused:
        package.build_engine(package.Config(model="zoo:llama-tiny", quantize=quantize))
    assert "\n" not in str(refused.value)
