"""Quantized checkpoints of Hugging Face folders, in groups: compressed-tensors, GPTQ and AWQ.

The checkpoints are written here, by the formats' descriptions. The oracle is transformers, on the numbers that the
checkpoints stand for.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.errors import StartupError
from common.models.layers import CausalLM, Linear
from common.models.registry import open_checkpoint, weight_bytes
from common.startup.phases import find_phase
from kernels.dispatch import has_native_products
from tests.support.models import (
    ZOO,
    draw_ids,
    largest_difference,
    load,
    oracle_logits,
    oracle_of,
    read_config,
    refusal_of,
    save_tiny,
    solo_logits,
    write_config,
)
from tests.support.packed import (
    WEIGHTS,
    Kind,
    awq_config,
    compressed_config,
    gptq_config,
    quantize_folder,
)

IDS = draw_ids(40)
#: Every size is a whole group of 128, and eight outputs fill a number.
SHAPE = {
    "vocab_size": 104,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "head_dim": 16,
}


CASES = [
    ("gptq", Kind(group=128, symmetric=True)),
    ("gptq", Kind(group=32)),
    ("gptq", Kind(group=32, symmetric=True, in_order=False)),
    ("gptq", Kind(group=64, in_order=False)),
    ("gptq", Kind(group=-1, symmetric=True)),
    ("gptq", Kind(bits=8, group=128, symmetric=True)),
    ("gptq", Kind(bits=8, group=32)),
    ("gptq_v2", Kind(group=64)),
    ("awq", Kind(group=128)),
    ("awq", Kind(group=64)),
    ("awq", Kind(group=32)),
    ("compressed", Kind(group=32, symmetric=True)),
    ("compressed", Kind(group=128, symmetric=True)),
    ("compressed", Kind(group=64)),
    ("compressed", Kind(group=128, in_order=False)),
    ("compressed", Kind(group=-1, symmetric=True)),
    ("compressed", Kind(bits=8, group=128)),
    ("compressed, plain zeros", Kind(group=128)),
    ("integers", Kind(bits=8, group=64, symmetric=True)),
]


def write(
    folder: Path,
    name: str,
    kind: Kind,
    architecture: str = "llama",
    *,
    only: str = "proj.weight",
    orders: Callable[[str], int] = lambda _: 0,
    shape: dict[str, int] = SHAPE,
    **entries: Any,
) -> tuple[Path, Path]:
    """Write a quantized checkpoint (as `quantize_folder`), and one with the numbers that it stands for."""
    plain = save_tiny(folder / "plain", architecture, **(shape | entries))
    numbers = quantize_folder(plain, folder / "quantized", name, kind, only=only, orders=orders)
    save_file(numbers, plain / WEIGHTS, metadata={"format": "pt"})
    return folder / "quantized", plain


def assert_computes(model: CausalLM, plain: Path) -> None:
    expected = oracle_logits(oracle_of(plain), IDS)
    assert largest_difference(solo_logits(model, IDS), expected) < 1e-4 * expected.abs().max().item()


def grouped_layers(model: CausalLM) -> list[str]:
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, Linear) and layer.layout is not None
    ]


# ---------------------------------------------------------------------- what is computed


@pytest.mark.parametrize(("name", "kind"), CASES, ids=str)
def test_a_checkpoint_in_groups_is_computed_with_its_own_numbers(
    name: str, kind: Kind, tmp_path: Path
) -> None:
    quantized, plain = write(tmp_path, name, kind)
    model = load(quantized, keep_groups=True)
    assert len(grouped_layers(model)) == 4 * model.config.num_layers  # all but the head
    assert_computes(model, plain)
    form_of = open_checkpoint(str(quantized)).form_of
    sizes = sum(parameter.nbytes for parameter in model.parameters())
    assert sizes == weight_bytes(model.config, torch.float32, form_of=form_of)
    # A form takes no more room than the file: panels of four bits with zero points have one code a block more.
    parts = load_file(quantized / WEIGHTS).items()
    stored = sum(part.nbytes for part_name, part in parts if "proj" in part_name and "g_idx" not in part_name)
    packed = sum(layer.weight.nbytes for layer in model.linear_layers() if layer.layout is not None)
    if name != "integers":
        assert packed < 1.2 * stored
    assert_computes(load(quantized), plain)  # dequantized


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gptq", Kind(group=64, in_order=False)),
        ("awq", Kind()),
        ("compressed", Kind(group=32, symmetric=True)),
    ],
)
@pytest.mark.parametrize("architecture", ["mistral", "qwen2", "qwen3", "gemma3_text"])
def test_every_architecture(name: str, kind: Kind, architecture: str, tmp_path: Path) -> None:
    quantized, plain = write(tmp_path, name, kind, architecture)
    assert_computes(load(quantized, keep_groups=True), plain)


@pytest.mark.parametrize("name", ["integers", "compressed"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3_text"])
def test_whole_rows_of_eight_bits(name: str, architecture: str, tmp_path: Path) -> None:
    """They are computed as int8. No size is a multiple of four, so the last number of a packed row is padded."""
    quantized, plain = write(tmp_path, name, Kind(bits=8, group=-1, symmetric=True), architecture, shape={})
    model = load(quantized)
    assert model.is_quantized
    assert model.lm_head.weight_scale is None, "as the checkpoint says"
    for prepare in (lambda: None, model.pack):
        prepare()
        assert_computes(model, plain)
    with_head = load(quantized)
    before = {name: tensor.clone() for name, tensor in with_head.named_parameters() if "proj" in name}
    with_head.quantize()
    assert with_head.lm_head.weight_scale is not None
    after = dict(with_head.named_parameters())
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("name", ["gptq", "awq", "compressed"])
def test_a_quantized_head(name: str, tmp_path: Path) -> None:
    quantized, plain = write(tmp_path, name, Kind(), only="lm_head.weight", tie_word_embeddings=False)
    model = load(quantized, keep_groups=True)
    assert grouped_layers(model) == ["lm_head"]
    assert_computes(model, plain)


def test_groups_that_are_no_whole_blocks_are_dequantized(tmp_path: Path) -> None:
    quantized, plain = write(tmp_path, "compressed", Kind(group=16))
    model = load(quantized, keep_groups=True)
    assert not grouped_layers(model)
    assert_computes(model, plain)


def test_fused_matrices_with_different_orders_are_dequantized(tmp_path: Path) -> None:
    quantized, plain = write(
        tmp_path, "gptq", Kind(group=64, in_order=False), orders=lambda name: "k_proj" in name
    )
    model = load(quantized, keep_groups=True)
    assert not any("qkv" in name for name in grouped_layers(model))
    assert len(grouped_layers(model)) == 3 * model.config.num_layers
    assert_computes(model, plain)


@pytest.mark.skipif(not has_native_products(torch.empty(0)), reason="only native kernels promise it")
def test_a_row_has_the_same_bits_in_any_batch_if_inputs_are_not_in_order(tmp_path: Path) -> None:
    quantized, _ = write(tmp_path, "gptq", Kind(group=64, in_order=False))
    model = load(quantized, keep_groups=True)
    model.pack()
    model.measure_batch_invariance()
    assert model.batch_invariant


# ---------------------------------------------------------------------- what real folders have


def test_biases_that_autogptq_adds(tmp_path: Path) -> None:
    quantized, plain = write(tmp_path, "gptq", Kind())
    stored = load_file(quantized / WEIGHTS)
    stems = [name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")]
    for stem in stems:
        stored[f"{stem}.bias"] = torch.zeros(stored[f"{stem}.scales"].shape[1], dtype=torch.float16)
    save_file(stored, quantized / WEIGHTS)
    assert_computes(load(quantized, keep_groups=True), plain)
    stored[f"{stems[0]}.bias"][3] = 1
    save_file(stored, quantized / WEIGHTS)
    message = refusal_of(load, quantized)
    assert "unexpected" in message
    assert f"{stems[0]}.bias" in message


def test_a_file_without_the_groups_of_inputs(tmp_path: Path) -> None:
    quantized, plain = write(tmp_path, "gptq", Kind())
    stored = load_file(quantized / WEIGHTS)
    save_file({name: part for name, part in stored.items() if "g_idx" not in name}, quantized / WEIGHTS)
    assert_computes(load(quantized, keep_groups=True), plain)


def test_groups_of_inputs_that_were_never_set(tmp_path: Path) -> None:
    quantized, plain = write(tmp_path, "compressed", Kind())
    stored = load_file(quantized / WEIGHTS)
    for name in [name for name in stored if name.endswith("_scale")]:
        inputs = load_file(plain / WEIGHTS)[name.removesuffix("_scale")].shape[1]
        stored[name.replace("_scale", "_g_idx")] = torch.full((inputs,), -1, dtype=torch.int32)
    save_file(stored, quantized / WEIGHTS)
    assert_computes(load(quantized, keep_groups=True), plain)


@pytest.mark.parametrize(
    ("name", "file", "config"),
    [
        ("gptq", "quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False, "sym": False}),
        (
            "awq",
            "quant_config.json",
            {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"},
        ),
    ],
)
def test_an_old_folder_has_the_quantization_in_a_file_of_its_own(
    name: str, file: str, config: dict[str, Any], tmp_path: Path
) -> None:
    quantized, plain = write(tmp_path, name, Kind())
    entries = read_config(quantized)
    del entries["quantization_config"]
    write_config(quantized, entries)
    (quantized / file).write_text(json.dumps(config))
    assert open_checkpoint(str(quantized)).unused == []
    assert_computes(load(quantized, keep_groups=True), plain)


def test_shards(tmp_path: Path) -> None:
    quantized, plain = write(tmp_path, "awq", Kind())
    stored = list(load_file(quantized / WEIGHTS).items())
    files = {
        "model-00001-of-00002.safetensors": stored[::2],
        "model-00002-of-00002.safetensors": stored[1::2],
    }
    for file, parts in files.items():
        save_file(dict(parts), quantized / file)
    names = itertools.chain(*([(name, file) for name, _ in parts] for file, parts in files.items()))
    (quantized / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(names)}))
    (quantized / WEIGHTS).unlink()
    assert_computes(load(quantized, keep_groups=True), plain)


def test_scales_that_no_float16_can_be(tmp_path: Path) -> None:
    quantized, plain = write(tmp_path, "compressed", Kind(group=32, symmetric=True))
    stored = load_file(quantized / WEIGHTS)
    name = next(name for name in stored if name.endswith("down_proj.weight_scale"))
    stored[name] *= 2.0**-20
    save_file(stored, quantized / WEIGHTS)
    message = refusal_of(lambda: load(quantized, keep_groups=True))
    assert message.startswith(name.removesuffix(".weight_scale"))
    assert "--quantize none" in message
    numbers = load_file(plain / WEIGHTS)
    numbers[name.removesuffix("_scale")] *= 2.0**-20
    save_file(numbers, plain / WEIGHTS, metadata={"format": "pt"})
    assert_computes(load(quantized), plain)


# ---------------------------------------------------------------------- what is said and refused


@pytest.mark.skipif(not has_native_products(torch.empty(0)), reason="weights are dequantized")
@pytest.mark.parametrize("option", ["auto", "none", "int8", "int4"])
def test_what_is_served_is_said(option: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    vocabulary = open_checkpoint("zoo:llama-tiny").config.vocab_size
    quantized, _ = write(tmp_path, "gptq", Kind(in_order=False), vocab_size=vocabulary)
    for file in (ZOO / "llama-tiny").glob("tokenizer*"):
        shutil.copy(file, quantized)
    package = find_phase("static")
    engine = package.build_engine(package.Config(model=str(quantized), dtype="float32", quantize=option))
    said = {"auto": "GPTQ, 4.4 bits a weight", "none": "float32", "int8": "int8", "int4": "int4"}[option]
    assert engine.maker.facts.weight_dtype == said
    loaded = next(line for line in caplog.messages if line.startswith("loaded"))
    assert "GPTQ, 4.4 bits a weight, " + ("computed" if option == "auto" else "dequantized") in loaded


def test_quantized_activations_are_named(tmp_path: Path) -> None:
    quantized, _ = write(tmp_path, "compressed", Kind(group=32, symmetric=True))
    config = read_config(quantized)
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
    write_config(quantized, config)
    assert "quantized activations" in open_checkpoint(str(quantized)).unused


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (gptq_config(Kind(), bits=3), ["gptq", "bits = 3", "4 or 8"]),
        (gptq_config(Kind(), checkpoint_format="marlin"), ["checkpoint_format", "'marlin'", "gptq_v2"]),
        (gptq_config(Kind(), is_marlin_format=True), ["is_marlin_format"]),
        (gptq_config(Kind(), pack_dtype="int8"), ["pack_dtype"]),
        (gptq_config(Kind(), adapter={"name": "lora"}), ["adapter", "lora"]),
        (awq_config(Kind(), version="gemv"), ["awq", "version", "'gemv'", "'gemm'"]),
        (awq_config(Kind(), bits=8), ["awq", "bits = 8"]),
        (compressed_config(Kind(), transform_config={"config_groups": {"u": {}}}), ["transform_config"]),
        (compressed_config(Kind(), "mixed-precision"), ["format = None"]),
        (compressed_config(Kind(), "nvfp4-pack-quantized"), ["'nvfp4-pack-quantized'"]),
        (
            compressed_config(Kind(), "marlin-24"),
            ["format", "'marlin-24'", "int-quantized or pack-quantized"],
        ),
        (compressed_config(Kind(bits=3)), ["num_bits", "3", "4 or 8"]),
        (compressed_config(Kind(), weights={"type": "float"}), ["type", "'float'"]),
        (compressed_config(Kind(), weights={"strategy": "tensor"}), ["strategy", "'tensor'"]),
        (compressed_config(Kind(), kv_cache_scheme={"num_bits": 8}), ["kv_cache_scheme"]),
        (
            compressed_config(Kind(), sparsity_config={"format": "sparse-24-bitmask"}),
            ["sparsity_config", "sparse-24-bitmask"],
        ),
        (compressed_config(Kind(), config_groups=None), ["config_groups"]),
        ({"quant_method": "auto-round", "bits": 4}, ["(auto-round)", "gptq, awq"]),
    ],
)
def test_other_schemes_are_refused_by_name(config: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    write_config(tmp_path, read_config(tmp_path) | {"quantization_config": config})
    message = refusal_of(open_checkpoint, str(tmp_path))
    assert message.startswith(str(tmp_path / "config.json"))
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("name", "part", "change", "words"),
    [
        ("gptq", "qzeros", None, ["qzeros is missing"]),
        ("gptq", "qzeros", lambda part: part[:, :1], ["qzeros", "does not fit"]),
        ("gptq", "qweight", lambda part: part[:, :8], ["qweight", "does not fit"]),
        ("gptq", "g_idx", lambda part: torch.zeros_like(part), ["g_idx", "different sizes"]),
        ("awq", "scales", lambda part: part[:, :8], ["does not fit"]),
        ("compressed", "weight_packed", lambda part: part[:, :3], ["weight_packed", "does not fit"]),
        ("compressed", "weight_zero_point", lambda part: part[:1], ["weight_zero_point", "does not fit"]),
        ("compressed", "weight_shape", None, ["weight_shape is missing"]),
    ],
)
def test_tensors_that_do_not_fit_each_other_are_refused(
    name: str, part: str, change: Callable[[Tensor], Tensor] | None, words: list[str], tmp_path: Path
) -> None:
    quantized, _ = write(tmp_path, name, Kind(group=32))
    stored = load_file(quantized / WEIGHTS)
    key = next(each for each in stored if each.endswith(f"down_proj.{part}"))
    changed = None if change is None else change(stored.pop(key))
    if changed is None:
        del stored[key]
    else:
        stored[key] = changed.contiguous()
    save_file(stored, quantized / WEIGHTS)
    with pytest.raises(StartupError) as refused:
        open_checkpoint(str(quantized))
    assert all(word in str(refused.value) for word in words), str(refused.value)
