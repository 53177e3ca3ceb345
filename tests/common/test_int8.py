"""`--quantize int8` and `int4`, and compressed-tensors checkpoints: memory, loading, messages and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import common.models.layers
import common.startup.build
import common.startup.memory
from common.errors import StartupError
from common.models.layers import CausalLM
from common.models.registry import open_checkpoint, weight_bytes
from common.startup.phases import find_phase
from kernels.grouped import grouped_linear_reference
from kernels.int8 import quantize
from tests.support.models import draw_ids, largest_difference, load, save_tiny, solo_logits

IDS = draw_ids(40)
WEIGHTS = "model.safetensors"


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


# ---------------------------------------------------------------------- compressed-tensors


def scheme(form: str = "int-quantized", **changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    found: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
    for key, value in changes.items():
        where = weights if key in weights else group if key in group else found
        where[key] = value
    return found


def packed_in_fours(values: Tensor) -> Tensor:
    """Pack int8 [N, K] into int32 [N, ceil(K / 4)] as the format does, by shifts."""
    padded = torch.nn.functional.pad(values.int() + 128, (0, -values.shape[1] % 4))
    shifted = padded.view(len(values), -1, 4).long() << torch.tensor([0, 8, 16, 24])
    total = shifted.sum(dim=-1)
    return torch.where(total >= 2**31, total - 2**32, total).int()


def compress(folder: Path, form: str, **changes: Any) -> None:
    """Rewrite a checkpoint of plain weights as a compressed-tensors one. The head is not quantized."""
    stored = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    found: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if not name.endswith("proj.weight"):
            found[name] = tensor
            continue
        values, scales = quantize(tensor)
        values[0, 0] = -128  # the format allows -128, our own quantizing does not make it
        found[f"{name}_scale"] = scales.to(torch.bfloat16)
        if form == "int-quantized":
            found[name] = values
        else:
            found[f"{name}_packed"] = packed_in_fours(values)
            found[f"{name}_shape"] = torch.tensor(values.shape)
    save_file(found, folder / WEIGHTS)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = scheme(form, **changes)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(params=["int-quantized", "pack-quantized"])
def form(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3_text"])
def test_a_compressed_checkpoint_is_computed_with_its_own_integers(
    architecture: str, form: str, tmp_path: Path
) -> None:
    # The sizes are no multiples of four, so the last number of a packed row is padded.
    save_tiny(tmp_path, architecture)
    rounded = load(tmp_path)
    for module in rounded.layers.modules():
        if isinstance(module, common.models.layers.Linear):
            for rows in module.weight.data.split(module.sizes):
                values, scales = quantize(rows)
                values[0, 0] = -128
                rows.copy_(values * scales.bfloat16().float())
    compress(tmp_path, form)
    model = load(tmp_path)
    assert model.is_quantized
    assert model.lm_head.weight_scale is None  # as the checkpoint says
    expected = solo_logits(rounded, IDS)
    for prepare in (lambda: None, model.pack):
        prepare()
        assert largest_difference(solo_logits(model, IDS), expected) < 1e-4 * expected.abs().max().item()


def test_quantize_int8_adds_the_head(form: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    compress(tmp_path, form)
    model = load(tmp_path)
    before = {name: tensor.clone() for name, tensor in model.named_parameters() if "proj" in name}
    model.quantize()
    assert model.lm_head.weight_scale is not None
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in model.named_parameters() if "proj" in name
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "marlin-24"}, ["format", "'marlin-24'", "int-quantized or pack-quantized"]),
        ({"format": "float-quantized"}, ["'float-quantized'"]),
        ({"num_bits": 3}, ["num_bits", "3", "4 or 8"]),
        ({"type": "float"}, ["type", "'float'"]),
        ({"strategy": "tensor"}, ["strategy", "'tensor'"]),
        ({"kv_cache_scheme": {"num_bits": 8}}, ["kv_cache_scheme"]),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, ["sparsity_config", "sparse-24-bitmask"]),
        ({"config_groups": None}, ["config_groups"]),
    ],
    ids=str,
)
def test_other_schemes_are_refused_by_name(changes: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = scheme(**changes)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError) as refused:
        open_checkpoint(str(tmp_path))
    message = str(refused.value)
    assert message.startswith(str(tmp_path / "config.json"))
    assert "\n" not in message
    assert all(word in message for word in words), message
