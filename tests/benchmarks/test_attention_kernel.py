"""The kernel benchmark where there is no GPU: its contenders agree, and it says what is missing."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch
from rich.console import Console

from benchmarks import attention_kernel
from benchmarks.attention_kernel import CONTENDERS, Shape, copy_bytes_per_s, main, measure, print_table

SHAPE = Shape(heads=4, heads_kv=2, head_dim=16, block_size=4, dtype=torch.float32, window=None)


def half_a_second(function: Callable[[], object]) -> float:
    function()
    return 0.5


def not_here(step: attention_kernel.Step) -> attention_kernel.Attend:
    raise NotImplementedError("not here")


@pytest.mark.parametrize("window", [None, 5])
def test_contenders_that_run_here_agree(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONTENDERS, "flex_attention", not_here)  # it would compile for a minute
    shape = Shape(4, 2, 16, 4, torch.float32, window)
    rows = measure(shape, 3, 18, 1e6, "cpu", half_a_second)
    assert [row["contender"] for row in rows] == list(CONTENDERS)
    ours, gather, varlen, *_ = rows
    visible = 18 if window is None else 5
    assert ours["bytes_per_s"] == 3 * (2 * visible * 2 + 2 * 4) * 16 * 4 / 0.5
    assert ours["share_of_copy"] == ours["bytes_per_s"] / 1e6
    assert ours["reason"] is None
    assert gather["difference"] < 1e-5
    assert varlen["seconds"] is None
    assert varlen["reason"]  # needs CUDA, and says so
    assert rows[-1]["reason"] == "NotImplementedError: not here"


def test_gathered_keys_are_those_that_are_visible() -> None:
    shape = Shape(4, 2, 16, 4, torch.float32, window=5)
    step = attention_kernel.Step.draw(shape, 2, 18, "cpu")
    k, v = step.gathered()
    got = torch.nn.functional.scaled_dot_product_attention(
        step.q.unsqueeze(2), k, v, scale=shape.scale, enable_gqa=True
    )
    torch.testing.assert_close(got.squeeze(2), attention_kernel.gather_torch(step)())


def test_a_wrong_result_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CONTENDERS:
        if name != "paged kernel":
            monkeypatch.setitem(CONTENDERS, name, lambda step: lambda: step.q + 1)
    rows = measure(SHAPE, 1, 8, 1e6, "cpu", half_a_second)
    assert rows[0]["seconds"] == 0.5
    assert all(row["seconds"] is None and "wrong by" in row["reason"] for row in rows[1:])
    text = io.StringIO()
    print_table(rows, SHAPE, Console(file=text, width=200))
    assert "500000 (" in text.getvalue()
    assert "wrong by" in text.getvalue()


def test_a_copy_reads_and_writes() -> None:
    assert copy_bytes_per_s("cpu", half_a_second, size=1000) == 4000


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device"):
        main([])
