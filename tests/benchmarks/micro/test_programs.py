"""Programs at toy sizes on a CPU: each measures every row. A GPU hour must not be lost to a typo."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

import benchmarks.__main__ as command_line
from benchmarks.micro import batch_size
from benchmarks.tables import load_tables
from tests.benchmarks.conftest import processes_are_forks

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU: `make gpu` itself is the test"
)


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        # 16 tokens: at two tokens a step, these are at least seven steps before the last.
        (
            "gpu_steps --model dummy:llama-1m --prompt-tokens 8 --new-tokens 16 --sequences 2 --dtype float32",
            8,
        ),
        ("gpu_attention --models dummy:llama-1m --sequences 2 --contexts 40 --dtype float32", 2),
        (
            "offline --model dummy:llama-1m --phases 9 5 --requests 4 --fewest 4 --most 8 --seats 3"
            " --dtype float32",
            2,
        ),
        ("kv_cache --model zoo:llama-tiny --lengths 3 9 --repeats 1", 2),
        ("batch_size --model zoo:llama-tiny --rows 1 3 --repeats 1", 2),
        pytest.param("pipeline --models zoo:llama-tiny --sequences 1 --repeats 1", 1, marks=pytest.mark.slow),
        pytest.param("tiered --model zoo:llama-tiny --document 160 --turns 1", 3, marks=pytest.mark.slow),
    ],
    ids=lambda value: str(value).split()[0],
)
def test_every_row_is_measured(
    words: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes_are_forks(monkeypatch)
    # Without an effect: a collection would scan the modules of all tests, here and in every later test.
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    for name, small in (("READ_BYTES", 2**20), ("PEAK_ROWS", 8), ("PEAK_SIZE", 128)):
        monkeypatch.setattr(batch_size, name, small)
    assert command_line.main(["micro", *words.split(), "--out", str(tmp_path)]) == 0
    (table,) = load_tables(tmp_path)
    assert len(table.rows) == rows
    assert all(len(row) == len(table.columns) for row in table.rows)
