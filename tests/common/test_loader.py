"""Weights from disk: every tensor is loaded to its place, and the error for a broken checkpoint names it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.models.layers import CausalLM, Quantization
from common.models.llama import Llama
from common.models.loader import checkpoint_tensors
from common.models.registry import parse_config
from tests.support.forked import in_a_fork, memory_bytes
from tests.support.models import (
    ARCHITECTURES,
    draw_ids,
    largest_difference,
    load,
    oracle_logits,
    oracle_of,
    refusal_of,
    save_tiny,
    solo_logits,
    write_config,
)

WEIGHTS = "model.safetensors"
EVERY_ARCHITECTURE = pytest.mark.parametrize("architecture", ARCHITECTURES)

Q, K = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"
STRAY = "model.layers.0.self_attn.q_norm.weight"
BIASED: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "qwen2": {},  # always has biases
    "qwen3": {"attention_bias": True},
    "gemma3_text": {"attention_bias": True},
}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "checkpoint", "llama")


def read(folder: Path) -> dict[str, Tensor]:
    """Return copies of a single-file checkpoint's tensors: safetensors maps the file, which tests rewrite."""
    return {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change a single-file checkpoint's tensors."""
    tensors = read(folder)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)


def change_header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of a checkpoint's file, but not its data."""
    raw = (folder / WEIGHTS).read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    change(header)
    new = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + size :])


def refusal(folder: Path) -> str:
    """Return the one-line error for a checkpoint, which must name its folder."""
    message = refusal_of(load, folder)
    assert folder.name in message
    return message


# ---------------------------------------------------------------------- every tensor in its place


def assert_holds(model: CausalLM, stored: dict[str, Tensor]) -> None:
    """Assert that a model of ours has exactly the checkpoint's tensors. The layout is written out by hand."""
    gemma = model.config.architecture == "gemma3_text"
    expected: list[tuple[Tensor, list[str]]] = [
        (model.embed_tokens.weight, ["model.embed_tokens.weight"]),
        (model.norm.weight, ["model.norm.weight"]),
    ]
    if model.config.tie_word_embeddings:
        assert model.lm_head.weight is model.embed_tokens.weight
    else:
        expected.append((model.lm_head.weight, ["lm_head.weight"]))
    for index, layer in enumerate(model.layers):
        attention, mlp, prefix = layer.self_attn, layer.mlp, f"model.layers.{index}"
        matrices = [
            (attention.qkv_proj, [f"{prefix}.self_attn.{name}_proj" for name in "qkv"]),
            (attention.o_proj, [f"{prefix}.self_attn.o_proj"]),
            (mlp.gate_up_proj, [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"]),
            (mlp.down_proj, [f"{prefix}.mlp.down_proj"]),
        ]
        for linear, names in matrices:
            expected.append((linear.weight, [f"{name}.weight" for name in names]))
            if linear.bias is not None:
                expected.append((linear.bias, [f"{name}.bias" for name in names]))
        norms = {
            "input_layernorm": layer.input_layernorm,
            "post_attention_layernorm": layer.post_attention_layernorm,
        }
        if gemma:
            norms["pre_feedforward_layernorm"] = layer.pre_feedforward_layernorm
            norms["post_feedforward_layernorm"] = layer.post_feedforward_layernorm
        if model.config.architecture in ("qwen3", "gemma3_text"):
            norms |= {"self_attn.q_norm": attention.q_norm, "self_attn.k_norm": attention.k_norm}
        expected += [(norm.weight, [f"{prefix}.{name}.weight"]) for name, norm in norms.items()]
    for parameter, names in expected:
        assert torch.equal(parameter, torch.cat([stored[name] for name in names]).to(parameter.dtype)), names
    # Nothing was left out on either side.
    assert {id(parameter) for parameter, _ in expected} == {id(parameter) for parameter in model.parameters()}
    assert sorted(name for _, names in expected for name in names) == sorted(stored)


@EVERY_ARCHITECTURE
def test_every_tensor_lands_in_its_rows(architecture: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, architecture, **BIASED[architecture])
    assert_holds(load(folder), read(folder))


def test_a_single_file_goes_before_an_index_of_earlier_shards(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", seed=1, shard_size="60KB")
    save_tiny(tmp_path, "llama", seed=2)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    ids = draw_ids(20)
    assert (
        largest_difference(solo_logits(load(tmp_path), ids), oracle_logits(oracle_of(tmp_path), ids)) < 1e-4
    )


def test_shards_are_one_checkpoint(llama: Path, tmp_path: Path) -> None:
    shards = save_tiny(tmp_path / "shards", "llama", shard_size="60KB")
    assert len(list(shards.glob("model-*.safetensors"))) > 2
    assert not (shards / WEIGHTS).exists()
    assert_holds(load(shards), read(llama))


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_stored_types_are_converted_tensor_by_tensor(
    stored: torch.dtype, kept: torch.dtype, llama: Path
) -> None:
    change_tensors(llama, lambda tensors: tensors.update({n: t.to(stored) for n, t in tensors.items()}))
    model = load(llama, dtype=kept)
    assert {parameter.dtype for parameter in model.parameters()} == {kept}
    assert_holds(model, read(llama))


@EVERY_ARCHITECTURE
def test_a_tied_file_may_repeat_the_embedding_and_hold_rotary_frequencies(
    architecture: str, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, architecture, tie_word_embeddings=True)
    plain = solo_logits(load(folder), draw_ids(9))
    assert "lm_head.weight" not in read(folder)
    extra = {
        "lm_head.weight": torch.zeros(97, 42),  # never read: the embedding is the head
        "model.rotary_emb.inv_freq": torch.zeros(8),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
    }
    change_tensors(folder, lambda tensors: tensors.update(extra))
    assert torch.equal(solo_logits(load(folder), draw_ids(9)), plain)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F9"},
        {"dtype": "F64"},  # needs twice the bytes of the data
        {"data_offsets": [0, 4]},
        {"data_offsets": [0]},
        {"data_offsets": ["0", "4"]},
        {"data_offsets": [-16128, 0]},
        {"shape": "96x42"},
        {"shape": [96, 43]},
    ],
    ids=str,
)
def test_a_header_entry_that_cannot_be(entry: dict[str, Any], llama: Path) -> None:
    change_header(llama, lambda header: header[Q].update(entry))
    message = refusal(llama)
    assert WEIGHTS in message
    assert "damaged" in message
    assert "header" in message


CHANGES: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda tensors: tensors.pop(Q), f"missing: {Q}"),
    "no head": (lambda tensors: tensors.pop("lm_head.weight"), "missing: lm_head.weight"),
    "unexpected": (lambda tensors: tensors.update({STRAY: torch.ones(16)}), f"unexpected: {STRAY}"),
    "smaller": (
        lambda tensors: tensors.update({Q: tensors[Q][:-1]}),
        f"wrong shape: {Q} is [95, 42], config.json makes it [96, 42]",
    ),
    "of the right size": (
        lambda tensors: tensors.update({Q: tensors[Q].T}),
        f"wrong shape: {Q} is [42, 96], config.json makes it [96, 42]",
    ),
    "float8": (
        lambda tensors: tensors.update({Q: tensors[Q].to(torch.float8_e4m3fn)}),
        f"{WEIGHTS}: {Q} is stored as F8_E4M3; we read F64, F32, BF16, F16",
    ),
    "integers": (
        lambda tensors: tensors.update({Q: tensors[Q].to(torch.int64)}),
        f"{WEIGHTS}: {Q} is stored as I64; we read F64, F32, BF16, F16",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_tensors_that_are_not_the_models(name: str, llama: Path) -> None:
    change, says = CHANGES[name]
    change_tensors(llama, change)
    assert says in refusal(llama)


@pytest.mark.parametrize("pickle", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_never_opened(pickle: str, llama: Path) -> None:
    (llama / WEIGHTS).rename(llama / pickle)
    message = refusal(llama)
    assert pickle in message
    assert "safetensors" in message


# ---------------------------------------------------------------------- memory


def sizes_of(folder: Path, dtype: torch.dtype, quantize: Quantization | None) -> tuple[int, int]:
    """Load a model. Returns the bytes of its parameters, and those by which the peak memory has risen."""
    before = memory_bytes("VmRSS")
    model = load(folder, dtype=dtype, max_positions=64, quantize=quantize)
    return sum(each.numel() * each.itemsize for each in model.parameters()), memory_bytes("VmHWM") - before


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of about 120 MB, bfloat16."""
    folder = tmp_path_factory.mktemp("large")
    config = {
        "model_type": "llama",
        "vocab_size": 8_000,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": True,
    }
    write_config(folder, config)
    with torch.device("meta"):
        tensors = checkpoint_tensors(Llama(parse_config(config), torch.bfloat16, 8))
    save_file({name: torch.rand(rows.shape).bfloat16() for name, rows in tensors.items()}, folder / WEIGHTS)
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize(
    ("dtype", "quantize", "megabytes"),
    [
        (torch.bfloat16, None, 110),
        (torch.float32, None, 220),
        (torch.float32, "int8", 56),
        (torch.float32, "int4", 38),
    ],
    ids=str,
)
@pytest.mark.slow
def test_loading_needs_the_models_memory_and_little_more(
    large: Path, dtype: torch.dtype, quantize: Quantization | None, megabytes: int
) -> None:
    size, risen = in_a_fork(sizes_of, large, dtype, quantize)
    assert size > megabytes * 10**6
    # Unquantized, 230 MB would be there. The embedding and a layer are, 33 MB each, and what the allocator keeps.
    bound = 200 * 10**6 if quantize else 1.3 * size
    assert risen <= bound, f"{risen:,} bytes for a model of {size:,}"
    assert risen >= 0.9 * size  # otherwise the measurement is broken
