"""Exports of dummies and GGUF files as Hugging Face folders: transformers and our loader read the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import benchmarks.__main__ as command_line
from benchmarks.export import export
from benchmarks.peers.weights import weights_of
from common.errors import StartupError
from common.models.presets import PRESETS
from common.models.registry import open_checkpoint
from tests.support.gguf_files import save_gguf
from tests.support.models import (
    draw_ids,
    largest_difference,
    load,
    oracle_logits,
    oracle_of,
    solo_logits,
    zoo,
)

TINY: dict[str, Any] = {
    "vocab_size": 1300,  # more than the dummy's tokenizer has
    "hidden_size": 42,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 56,
    "max_position_embeddings": 256,
}
LIKE = {"tiny-llama": "llama-60m", "tiny-qwen3": "qwen3-60m", "tiny-gemma3": "gemma3-60m"}


@pytest.fixture(autouse=True)
def tiny_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Presets of each architecture small enough to run twice."""
    presets: Any = PRESETS
    for name, like in LIKE.items():
        monkeypatch.setitem(presets, name, {**PRESETS[like], **TINY})
    untied = {**PRESETS["tiny-llama"], "tie_word_embeddings": False}
    monkeypatch.setitem(presets, "tiny-untied", untied)


@pytest.mark.parametrize("preset", [*LIKE, "tiny-untied"])
@pytest.mark.slow
def test_transformers_and_our_loader_find_the_dummy_again(preset: str, tmp_path: Path) -> None:
    export(f"dummy:{preset}", tmp_path / "out", "float32")
    dummy, again = load(f"dummy:{preset}"), load(tmp_path / "out")
    for (name, ours), theirs in zip(dummy.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    ids = draw_ids(20, TINY["vocab_size"])
    logits = solo_logits(dummy, ids)
    assert torch.equal(logits, solo_logits(again, ids))
    assert largest_difference(logits, oracle_logits(oracle_of(tmp_path / "out"), ids)) < 1e-4


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_gguf_file_is_exported_as_it_is_served(architecture: str, tmp_path: Path) -> None:
    file = save_gguf(zoo(f"{architecture}-tiny"), tmp_path / "model.gguf", tokenizer=f"{architecture}-tiny")
    export(str(file), tmp_path / "out", "float32")
    ours, again = open_checkpoint(str(file)), open_checkpoint(str(tmp_path / "out"))
    text = "Once upon a time there was a brave fox named Zoë."
    ids = again.tokenizer().encode(text)
    assert ids == ours.tokenizer().encode(text)
    logits = solo_logits(load(str(file)), ids)
    assert torch.equal(logits, solo_logits(load(tmp_path / "out"), ids))
    assert largest_difference(logits, oracle_logits(oracle_of(tmp_path / "out"), ids)) < 1e-4


def test_the_command_writes_a_folder_and_says_what_is_wrong_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert command_line.main(["export", "tiny-llama", out]) == 0
    assert {path.name for path in Path(out).iterdir()} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    capsys.readouterr()
    for arguments, said in (
        (["export", "tiny-llama", out], "holds something already"),
        (["export", "nobody", out], "no model 'nobody'"),
    ):
        assert command_line.main(arguments) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    with pytest.raises(StartupError, match="is in a folder already"):
        export("zoo:llama-tiny", tmp_path / "other")
    assert command_line.main(["export", "dummy:tiny-llama", str(tmp_path / "again")]) == 0


def test_a_peers_weights_are_exported_once_for_each_type(tmp_path: Path) -> None:
    first = weights_of("dummy:tiny-llama", "float32", tmp_path)
    written = (first.folder / "model.safetensors").stat().st_mtime_ns
    again = weights_of("dummy:tiny-llama", "float32", tmp_path)
    assert again == first
    assert (again.folder / "model.safetensors").stat().st_mtime_ns == written
    assert weights_of("dummy:tiny-llama", "bfloat16", tmp_path).folder != first.folder
    assert weights_of("dummy:tiny-qwen3", "float32", tmp_path).folder != first.folder
    assert torch.equal(load(first.folder).embed_tokens.weight, load("dummy:tiny-llama").embed_tokens.weight)


def test_a_preset_that_changes_is_exported_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = weights_of("dummy:tiny-llama", "float32", tmp_path)
    presets: Any = PRESETS
    monkeypatch.setitem(presets, "tiny-llama", {**PRESETS["tiny-llama"], "num_hidden_layers": 2})
    second = weights_of("dummy:tiny-llama", "float32", tmp_path)
    assert second.folder != first.folder
    assert load(second.folder).config.num_layers == 2


def test_a_checkpoint_is_served_from_where_it_is(tmp_path: Path) -> None:
    weights = weights_of("zoo:llama-tiny", "float32", tmp_path)
    assert weights.folder == open_checkpoint("zoo:llama-tiny").folder
    assert not list(tmp_path.iterdir())
