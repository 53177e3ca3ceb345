"""The models compared with transformers, and a flat pass over many sequences with each sequence alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.engine.reference import generate
from common.kv import Span
from common.models.config import RopeConfig
from common.models.layers import CausalLM, Linear, RotaryTable, TokenBatch
from common.models.registry import open_checkpoint
from common.request import Request, SamplingParams
from kernels import native
from tests.support.engines import tiny_model
from tests.support.models import (
    ARCHITECTURES,
    ZOO_NAMES,
    draw_ids,
    fill,
    largest_difference,
    load,
    oracle_logits,
    oracle_of,
    read_config,
    run_pass,
    save_tiny,
    scattered,
    solo_logits,
    zoo,
)

PARITY = 1e-4  # float32 against float32
FLAT = 1e-4  # a pass over many sequences against one sequence alone: the same sums in another order

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 5_000.0, "factor": 4.0}
WINDOWS = {"use_sliding_window": True, "sliding_window": 8}
PLAIN = {"rope_type": "default", "rope_theta": 3_000.0}

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "grouped queries, untied", {}),
    ("llama", "tied", {"tie_word_embeddings": True}),
    ("llama", "one KV head", {"num_key_value_heads": 1}),
    ("llama", "a KV head per query head", {"num_key_value_heads": 6}),
    ("llama", "head_dim is hidden_size / heads", {"hidden_size": 60, "head_dim": None}),
    ("llama", "attention bias", {"attention_bias": True}),
    ("llama", "MLP bias", {"mlp_bias": True}),
    ("llama", "llama3 RoPE past the original length", {"rope_parameters": LLAMA3}),
    ("llama", "linear RoPE", {"rope_parameters": LINEAR}),
    ("mistral", "prompt past the window", {}),
    ("mistral", "no window", {"sliding_window": None}),
    ("mistral", "tied", {"tie_word_embeddings": True}),
    ("mistral", "head_dim is hidden_size / heads", {"hidden_size": 60, "head_dim": None}),
    ("qwen2", "grouped queries, untied", {}),
    ("qwen2", "tied", {"tie_word_embeddings": True}),
    ("qwen2", "a window, unused", {"sliding_window": 8, "max_window_layers": 1}),
    ("qwen2", "windows from a layer on", WINDOWS | {"max_window_layers": 1}),
    ("qwen2", "windows in every layer", WINDOWS | {"max_window_layers": 0}),
    ("qwen3", "windows from a layer on", WINDOWS | {"max_window_layers": 1}),
    ("qwen3", "grouped queries, untied", {}),
    ("qwen3", "tied", {"tie_word_embeddings": True}),
    ("qwen3", "one KV head", {"num_key_value_heads": 1}),
    ("qwen3", "attention bias", {"attention_bias": True}),
    ("qwen3", "linear RoPE", {"rope_parameters": LINEAR}),
    ("gemma3_text", "prompt past the window", {}),
    ("gemma3_text", "one KV head", {"num_key_value_heads": 1}),
    ("gemma3_text", "untied", {"tie_word_embeddings": False}),
    ("gemma3_text", "attention bias", {"attention_bias": True}),
    ("gemma3_text", "window of one", {"sliding_window": 1}),
    (
        "gemma3_text",
        "linear RoPE on global layers",
        {"rope_parameters": {"sliding_attention": PLAIN, "full_attention": LINEAR}},
    ),
    (
        "gemma3_text",
        "a global layer in every three",
        {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]},
    ),
]
EVERY_CASE = pytest.mark.parametrize(
    ("architecture", "entries"),
    [
        pytest.param(architecture, entries, id=f"{architecture}-{name}")
        for architecture, name, entries in CASES
    ],
)
EVERY_ZOO_MODEL = pytest.mark.parametrize("name", ZOO_NAMES)

REAL_CHECKPOINTS = [folder for folder in os.environ.get("INFER_TEST_MODELS", "").split(",") if folder]
STORY = "Once upon a time there was a fox who lived by the river. Every morning she "


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """A tiny random model of each architecture; Gemma's window is 8, Mistral's 32."""
    return load(save_tiny(tmp_path_factory.mktemp("tiny"), request.param))


@cache
def zoo_model(name: str) -> CausalLM:
    return load(zoo(name))


@cache
def zoo_oracle(name: str) -> Any:
    return oracle_of(zoo(name))


def logits_token_by_token(model: CausalLM, token_ids: Sequence[int], prompt: int) -> Tensor:
    """Return the logits at all positions: `prompt` tokens are computed in one pass, later tokens one by one."""
    pool = scattered(model, [len(token_ids)])
    pieces = [token_ids[:prompt], *([token_id] for token_id in token_ids[prompt:])]
    return torch.cat([run_pass(model, pool, [(0, piece)])[0] for piece in pieces])


def generate_ours(
    model: CausalLM, prompt: Sequence[int], tokens: int, eos_token_ids: frozenset[int] = frozenset()
) -> list[int]:
    request = Request(
        request_id="greedy",
        prompt_token_ids=list(prompt),
        params=SamplingParams(temperature=0.0, max_new_tokens=tokens),
        eos_token_ids=eos_token_ids,
    )
    return [output.token_id for output in generate(model, request) if output.token_id is not None]


def generate_theirs(oracle: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    ids = torch.tensor([list(prompt)])
    written = oracle.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, pad_token_id=0
    )
    new: list[int] = written[0, len(prompt) :].tolist()
    return new


# ---------------------------------------------------------------------- parity with transformers


@EVERY_CASE
def test_logits_are_those_of_transformers_at_every_position(
    architecture: str, entries: dict[str, Any], tmp_path: Path
) -> None:
    save_tiny(tmp_path, architecture, **entries)
    model, token_ids = load(tmp_path), draw_ids(90)
    expected = oracle_logits(oracle_of(tmp_path), token_ids)
    assert expected.std() > 1.0  # nearly equal logits would agree with any model
    assert largest_difference(solo_logits(model, token_ids), expected) < PARITY
    assert largest_difference(logits_token_by_token(model, token_ids, prompt=40), expected) < PARITY


def test_row_p_of_the_rotary_table_has_the_angles_of_position_p() -> None:
    table = RotaryTable(RopeConfig(10_000.0), head_dim=4, max_positions=3)
    table.fill()
    angles = torch.tensor([[0.0, 0.0], [1.0, 0.01], [2.0, 0.02]])
    torch.testing.assert_close(table.cos, angles.cos())
    torch.testing.assert_close(table.sin, angles.sin())


@EVERY_ZOO_MODEL
def test_zoo_logits_are_those_of_transformers(name: str) -> None:
    model = zoo_model(name)
    story = open_checkpoint(str(zoo(name))).tokenizer().encode(STORY * 12)[:250]
    noise = draw_ids(250, model.config.vocab_size)
    for token_ids in (story, noise):  # longer than every window and every original RoPE length of the zoo
        assert len(token_ids) == 250
        expected = oracle_logits(zoo_oracle(name), token_ids)
        assert largest_difference(solo_logits(model, token_ids), expected) < PARITY
        assert largest_difference(logits_token_by_token(model, token_ids, prompt=220), expected) < PARITY


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    entries = {"rope_parameters": LLAMA3} if architecture == "llama" else {"tie_word_embeddings": False}
    save_tiny(tmp_path, architecture, **entries)
    model, oracle = load(tmp_path), oracle_of(tmp_path)
    different = set()
    for seed, length in enumerate((1, 50)):
        prompt = draw_ids(length, seed=seed)
        written = generate_ours(model, prompt, 32)
        assert written == generate_theirs(oracle, prompt, 32)
        different |= set(written)
    assert len(different) > 8  # the texts do not repeat one or two tokens


@EVERY_ZOO_MODEL
def test_zoo_greedy_tokens_are_those_of_transformers(name: str) -> None:
    checkpoint = open_checkpoint(str(zoo(name)))
    token_ids = checkpoint.tokenizer().encode("Once upon a time")
    written = generate_ours(zoo_model(name), token_ids, 60, checkpoint.config.eos_token_ids)
    assert written == generate_theirs(zoo_oracle(name), token_ids, 60)


# Prefixes of tensor names in multimodal checkpoints, today's and those that earlier versions of transformers wrote.
OUTSIDE: dict[str, str] = {}
INSIDE = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}


def save_multimodal(folder: Path, *, tied: bool) -> transformers.Gemma3ForConditionalGeneration:
    """Write a tiny `Gemma3ForConditionalGeneration` with random weights."""
    text = read_config(save_tiny(folder / "text", "gemma3_text")) | {"tie_word_embeddings": tied}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        tie_word_embeddings=tied,
    )
    oracle = transformers.Gemma3ForConditionalGeneration(config).eval()
    fill(oracle.model.language_model, seed=0)
    if not tied:
        oracle.lm_head.weight.data = torch.randn(97, 42, generator=torch.Generator().manual_seed(1))
    oracle.save_pretrained(folder)
    return oracle


def rename_tensors(folder: Path, prefixes: dict[str, str]) -> None:
    """In the names of tensors, replace each prefix that is a key of `prefixes` by its value."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    for theirs, ours in prefixes.items():
        for name in [name for name in tensors if name.startswith(theirs)]:
            tensors[ours + name.removeprefix(theirs)] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("prefixes", [OUTSIDE, INSIDE], ids=["outside", "inside"])
def test_a_multimodal_gemma_writes_as_in_transformers(
    prefixes: dict[str, str], tied: bool, tmp_path: Path
) -> None:
    oracle, token_ids = save_multimodal(tmp_path, tied=tied), draw_ids(90)
    rename_tensors(tmp_path, prefixes)
    names = set(load_file(tmp_path / "model.safetensors"))
    inside = prefixes is INSIDE
    assert ("model.language_model.norm.weight" in names) is inside
    assert ("language_model.model.norm.weight" in names) is not inside
    assert any("vision_tower" in name for name in names)
    assert any("lm_head" in name for name in names) is not tied
    expected = oracle_logits(oracle, token_ids)
    assert expected.std() > 1.0
    model = load(tmp_path)
    assert largest_difference(solo_logits(model, token_ids), expected) < PARITY
    assert generate_ours(model, token_ids[:20], 16) == generate_theirs(oracle, token_ids[:20], 16)


@pytest.mark.checkpoints
@pytest.mark.parametrize("folder", REAL_CHECKPOINTS)
def test_real_checkpoint_equals_transformers(folder: str) -> None:
    """`INFER_TEST_MODELS=dir,dir pytest -m checkpoints`. Two copies in float32 need 8 bytes per parameter."""
    checkpoint = open_checkpoint(folder)
    model, oracle = load(folder, max_positions=2048), oracle_of(Path(folder))
    token_ids = checkpoint.tokenizer().encode(STORY * 40)[:600]  # longer than Gemma's window of 512
    expected = oracle_logits(oracle, token_ids)
    # Real logits reach 30 and more, where float32 is coarser, so the bound grows with them.
    bound = PARITY * max(1.0, expected.abs().max().item())
    assert largest_difference(solo_logits(model, token_ids), expected) < bound
    prompt = checkpoint.tokenizer().encode(STORY)
    eos = checkpoint.config.eos_token_ids
    assert generate_ours(model, prompt, 32, eos) == generate_theirs(oracle, prompt, 32)


# ---------------------------------------------------------------------- the flat pass


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_sequences_at_different_places_in_one_pass(model: CausalLM, block_size: int) -> None:
    """Passes mix decode, prompts and chunks in any order. All sequences get the logits that they get alone."""
    sequences = [draw_ids(length, seed=length) for length in (31, 5, 40, 12, 33)]
    expected = [solo_logits(model, ids) for ids in sequences]
    pool = scattered(model, [len(ids) for ids in sequences], block_size)
    passes = (
        [(0, 20), (1, 4)],  # two prompts
        [(0, 1), (1, 1), (2, 9)],  # two decode while a third's first chunk comes
        [(2, 16), (0, 1), (3, 12), (4, 1)],  # a later chunk, decode after it, a prompt, a prompt of one
        [(4, 2), (2, 14)],
        [(0, 1), (4, 1), (2, 1)],  # all decode, in another order
        [(4, 29), (0, 8)],
    )
    for pieces in passes:
        starts = {slot: pool.get_seq_len(slot) for slot, _ in pieces}
        got = run_pass(
            model, pool, [(slot, sequences[slot][starts[slot] : starts[slot] + n]) for slot, n in pieces]
        )
        for (slot, n), logits in zip(pieces, got, strict=True):
            assert largest_difference(logits, expected[slot][starts[slot] : starts[slot] + n]) < FLAT
    assert [pool.get_seq_len(slot) for slot in range(5)] == [len(ids) for ids in sequences]


def test_the_head_sees_only_the_rows_asked_for(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    token_ids = draw_ids(25)
    expected = solo_logits(model, token_ids)
    shapes: list[tuple[torch.Size, torch.Size]] = []
    linear = torch.nn.functional.linear

    def recording_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        shapes.append((x.shape, weight.shape))
        return linear(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", recording_linear)
    pool = scattered(model, [25])
    view = pool.view([Span.exact(0, 0, 25)])
    rows = torch.tensor([24, 3])
    logits = model(TokenBatch(torch.tensor(token_ids), view.positions, rows), view)
    assert largest_difference(logits, expected[rows]) < FLAT
    config = model.config
    assert shapes.pop() == ((2, config.hidden_size), (config.vocab_size, config.hidden_size))
    assert len(shapes) == 4 * config.num_layers  # QKV, out, gate and up, down
    assert all(x[0] == 25 for x, _ in shapes)
    assert all(weight[0] != config.vocab_size for _, weight in shapes)


# ---------------------------------------------------------------------- capture


@pytest.mark.parametrize("tied", [True, False])
def test_packed_weights_are_held_once_and_compute_the_same(tied: bool) -> None:
    """Only a tied embedding is held twice."""
    if not native.is_loaded() or not native.has_products(torch.float32):
        pytest.skip("no native kernels here")
    model = tiny_model(tie_word_embeddings=tied)
    before = sum(parameter.nbytes for parameter in model.parameters())
    expected = logits_of(model)
    model.pack()
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    assert linears
    assert all(linear.packed is not None and linear.weight.numel() == 0 for linear in linears)
    kept = sum(parameter.nbytes for parameter in model.parameters())
    assert kept < before
    assert model.lm_head in linears
    assert model.embed_tokens.weight.numel() > 0
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-4, atol=1e-4)


def logits_of(model: CausalLM) -> Tensor:
    return run_pass(model, scattered(model, [30]), [(0, [3, 1, 4, 1, 5, 9, 2, 6])])[0]
