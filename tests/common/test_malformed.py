"""Malformed checkpoints: each is refused in one short line, before memory is taken, and no other model suffers."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from common.models.registry import default_params, load_model, open_checkpoint
from tests.support.models import CPU, refusal_of, save_tiny, zoo

#: The tokenizers library panics: it cuts a prefix off that is longer than the merged token.
PANIC = {
    "type": "BPE",
    "vocab": {"a": 0, "b": 1},
    "merges": [["a", "b"]],
    "continuing_subword_prefix": "x" * 99,
}

#: It adds a token to each text without saying which.
LACKING = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = save_tiny(tmp_path / "model", "llama", vocab_size=1300)
    for name in FILES:
        shutil.copy(zoo("llama-tiny") / name, folder)
    return folder


def serve(name: Path) -> None:
    """Read everything that a server reads from a checkpoint."""
    checkpoint = open_checkpoint(str(name))
    default_params(checkpoint)
    checkpoint.tokenizer()
    load_model(checkpoint, device=CPU, dtype=torch.float32, max_positions=16)


def check_refusal(name: Path, words: str) -> None:
    tracemalloc.start()
    message = refusal_of(serve, name)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert words in message
    assert len(message) < 600
    assert peak < 100e6


@pytest.mark.parametrize(
    ("file", "entries", "words"),
    [
        ("config", {"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 1000"),
        ("config", {"vocab_size": 2**62}, "vocab_size must be at most"),
        ("config", {"head_dim": 10**400}, "head_dim must be at most"),
        ("config", {"head_dim": 7}, "head_dim must be even"),
        ("config", {"hidden_size": "large" * 10**5}, "hidden_size must be a positive integer"),
        ("config", {"intermediate_size": 2.5}, "intermediate_size must be a positive integer"),
        ("config", {"max_position_embeddings": 2**63}, "max_position_embeddings must be at most"),
        ("config", {"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ("config", {"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        ("config", {"rope_parameters": "yarn"}, "rope_parameters must be an object"),
        ("config", {"rope_parameters": None, "rope_scaling": "yarn"}, "rope_scaling must be an object"),
        ("config", {"rope_parameters": {"rope_type": ["linear"]}}, "rope_type ['linear'] is not one of"),
        ("config", {"model_type": "x" * 10**5}, "model_type"),
        ("config", {"hidden_act": {"a": 1}}, "hidden_act"),
        ("config", {"quantization_config": "fp8"}, "quantization_config"),
        ("generation_config", {"temperature": float("inf")}, "temperature"),
        ("generation_config", {"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
        ("tokenizer_config", {"added_tokens_decoder": [1]}, "added_tokens_decoder must be an object"),
        ("tokenizer_config", {"added_tokens_decoder": {"x": {"content": "a"}}}, "has an invalid token: 'x'"),
        (
            "tokenizer_config",
            {"added_tokens_decoder": {"2000": {"content": 5}}},
            "has an invalid token: '2000'",
        ),
        ("tokenizer_config", {"added_tokens_decoder": {"2000": 5}}, "has an invalid token: '2000'"),
        ("added_tokens", {"<a>": [1]}, "has an invalid token"),
        ("added_tokens", {"<a>": None}, "has an invalid token"),
        ("tokenizer", {"model": {"type": "BPE"}}, "tokenizer.json cannot be read"),
        ("tokenizer", {"model": None}, "tokenizer.json cannot be read"),
        ("tokenizer", {"added_tokens": "none"}, "tokenizer.json cannot be read"),
        ("tokenizer", {"model": PANIC}, "tokenizer.json cannot be read"),
        ("tokenizer", {"post_processor": LACKING}, "tokenizer.json cannot be read"),
        ("model.safetensors.index", {"weight_map": [1]}, "has no weight_map"),
        ("model.safetensors.index", {"weight_map": {"a": "nothing"}}, "lacks nothing, which its"),
        ("model.safetensors.index", {"weight_map": {"a": "x" * 10**5}}, "which its model.safetensors.index"),
    ],
    ids=lambda value: f"{value!r:.60}",
)
def test_entries_of_a_folder(folder: Path, file: str, entries: dict[str, Any], words: str) -> None:
    path = folder / f"{file}.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | entries))
    if file.endswith("index"):
        (folder / "model.safetensors").unlink()  # it goes before an index
    check_refusal(folder, words)
    if before:
        path.write_text(json.dumps(before))
        serve(folder)


@pytest.mark.parametrize(
    "content",
    [b"", b"[" * 10**5, b'{"a":' * 10**5, b"\xff\xfe{}", b"\0" * 99, b'{"a": ' + b"9" * 5000 + b"}"],
)
@pytest.mark.parametrize("name", ["config.json", *FILES[:2], FILES[3], "model.safetensors"])
def test_bytes_of_a_folders_files(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    check_refusal(folder, name)
    (folder / name).unlink()
    (folder / name).mkdir()
    if name in ("config.json", "tokenizer.json", "model.safetensors"):
        check_refusal(folder, str(folder))


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 10**3, "{% if x %}" * 200, "{{ x" + "[0]" * 10**3 + " }}", "\udcff"]
)
def test_chat_templates(folder: Path, source: str) -> None:
    (folder / "chat_template.jinja").write_text(source, errors="surrogateescape")
    check_refusal(folder, "the chat template")
