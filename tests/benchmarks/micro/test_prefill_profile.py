"""The profile of a prompt: its parts have names, and together take all of its time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import benchmarks.__main__ as command_line
from benchmarks.micro import prefill_profile
from benchmarks.micro.decode_step import Batch
from kernels import native


@pytest.mark.skipif(not native.is_loaded(), reason="no native kernels here")
def test_every_part_takes_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_profile, "MANY", Batch(3, 20, 1))
    monkeypatch.setattr(prefill_profile, "LONG", Batch(1, 200, 1))
    monkeypatch.setattr(prefill_profile, "MAX_SEQ_LEN", 256)
    command_line.main(
        ["micro", "prefill_profile", "--model", "zoo:llama-tiny", "--repeats", "1", "--out", str(tmp_path)]
    )
    table = json.loads((tmp_path / "tables" / "prefill_profile.json").read_text())
    assert [row[0] for row in table["rows"]] == ["3 × 20"] * 6 + ["1 × 200"] * 6
    assert all(row[2] > 0 for row in table["rows"])
    for name in ("3 × 20", "1 × 200"):
        assert sum(row[3] for row in table["rows"] if row[0] == name) == pytest.approx(100)
