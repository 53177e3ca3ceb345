"""The programs of `make gpu` at toy sizes on a CPU: a GPU hour must not be lost to a typo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import benchmarks.__main__ as command_line
from benchmarks.tables import load_tables

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU: `make gpu` itself is the test"
)


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        # 16 tokens: at two tokens a step, these are at least seven steps before the last.
        ("gpu_steps --model dummy:llama-1m --prompt-tokens 8 --new-tokens 16 --sequences 2", 8),
        ("gpu_attention --models dummy:llama-1m --sequences 2 --contexts 40", 2),
        ("offline --model dummy:llama-1m --phases 9 5 --requests 4 --fewest 4 --most 8 --seats 3", 2),
    ],
    ids=["gpu_steps", "gpu_attention", "offline"],
)
def test_every_row_is_measured(words: str, rows: int, tmp_path: Path) -> None:
    options = ["--dtype", "float32", "--out", str(tmp_path)]
    assert command_line.main(["micro", *words.split(), *options]) == 0
    (table,) = load_tables(tmp_path)
    assert len(table.rows) == rows
