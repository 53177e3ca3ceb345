"""A file's own bits beside other weights and llama.cpp: files with random weights, rows and columns."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks.micro import int8, own_bits
from benchmarks.peers import random_gguf
from common.models.presets import PRESETS
from kernels import native
from tests.support.models import draw_ids, load, solo_logits

pytestmark = pytest.mark.skipif(
    not native.is_loaded() or not native.has_products(torch.float32), reason="no native kernels here"
)

#: Sizes that are whole blocks of 256, and layers of both kinds.
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 600}

#: Takes lines as `llama_passes.py` does.
PEER = "import sys\nprint('ready', flush=True)\nfor line in sys.stdin: print(len(line), flush=True)\n"


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "READ_BYTES", 2**20)
    monkeypatch.setattr(random_gguf, "default_cache", lambda: tmp_path)
    for preset in ("llama-3.1-8b", "qwen3-0.6b"):
        monkeypatch.setitem(PRESETS, preset, PRESETS[preset] | SMALL)


@pytest.mark.parametrize("preset", ["llama-3.1-8b", "qwen3-0.6b"])
@pytest.mark.slow
def test_a_random_file_has_the_groups_of_q4_k_m(preset: str) -> None:
    file = random_gguf.random_gguf(preset)
    own, whole = load(file, keep_groups=True), load(file)
    assert {form.bits for layer in own.linear_layers() for form in layer.layout.forms} == {4, 6}
    ids = draw_ids(20, 500)
    logits, expected = solo_logits(own, ids), solo_logits(whole, ids)
    assert expected.isfinite().all()
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())
    written = file.stat().st_mtime_ns
    assert random_gguf.random_gguf(preset).stat().st_mtime_ns == written  # it is kept


@pytest.mark.slow
def test_every_pass_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = tmp_path / "peer.py"
    peer.write_text(PEER)
    monkeypatch.setattr(own_bits, "PEER", peer)
    monkeypatch.setattr(own_bits, "PROMPT", 150)
    monkeypatch.setattr(own_bits, "COLUMNS", {"step": ("step", 4), "prompt": ("prompt", 150)})
    (table,) = own_bits.speed(models=("qwen3-0.6b",), llama=sys.executable, repeats=1)
    assert [row[1] for row in table.rows] == ["own bits", "none", "int8", "llama.cpp"]
    own, whole, half, peers = (row[2:] for row in table.rows)
    assert own[0] < half[0] < whole[0]
    assert all(cell > 0 for row in (own, whole, half) for cell in row)
    assert peers == [None, None, len("step 4\n"), len("prompt 150\n")]


def test_a_peer_that_ends_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = tmp_path / "peer.py"
    peer.write_text("raise SystemExit(3)")
    monkeypatch.setattr(own_bits, "PEER", peer)
    with pytest.raises(ValueError, match="exit code 3"):
        next(own_bits.speed(models=("qwen3-0.6b",), ways=(), llama=sys.executable))
