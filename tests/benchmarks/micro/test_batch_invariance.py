"""Answers under load compared with answers alone: the requests, and that changes are counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import benchmarks.__main__ as command_line
import common.models.layers
from benchmarks.micro import batch_invariance
from benchmarks.micro.batch_invariance import COLUMNS, NEW_TOKENS, PROMPT_TOKENS, count_changes, draw_orders
from benchmarks.micro.engines import build_engine
from common.models.registry import open_checkpoint
from kernels import native
from kernels.linear import packed_linear

MODEL = "zoo:llama-tiny"


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink the memory, so that a few requests are enough for preemptions."""
    monkeypatch.setattr(batch_invariance, "NUM_BLOCKS", 24)


def count(dtype: str = "bfloat16", *, native_kernels: bool = True) -> dict[str, object]:
    row = count_changes("phase7_chunked", MODEL, dtype, native_kernels, 12)
    return dict(zip(COLUMNS, row, strict=True))


def test_what_is_asked_is_varied_and_always_the_same() -> None:
    tokenizer = open_checkpoint(MODEL).tokenizer()
    greedy, sampled = (draw_orders(tokenizer, 60, sampled=sampled) for sampled in (False, True))
    assert greedy == draw_orders(tokenizer, 60, sampled=False)
    assert sampled == draw_orders(tokenizer, 60, sampled=True)
    assert {params.temperature for _, params in greedy} == {0.0}
    assert all(params.temperature > 0 and params.seed is not None for _, params in sampled)
    for orders in (greedy, sampled):
        lengths = {len(prompt) for prompt, _ in orders}
        assert len(lengths) > 30
        assert PROMPT_TOKENS[0] <= min(lengths) < max(lengths) <= PROMPT_TOKENS[1]
        assert all(NEW_TOKENS[0] <= params.max_new_tokens <= NEW_TOKENS[1] for _, params in orders)
    assert 0 < sum(params.repetition_penalty > 1 for _, params in sampled) < 60
    assert 0 < sum(bool(params.stop) for _, params in sampled) < 60


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_answer_changes_with_native_kernels(dtype: str) -> None:
    if not native.is_loaded() or not native.has_products(getattr(torch, dtype)):
        pytest.skip("no native kernels here")
    found = count(dtype)
    assert (found["kernels"], found["batch invariant"]) == ("native", "yes")
    assert [found[column] for column in COLUMNS if column.endswith(("token", "log-probabilities"))] == [
        0,
        0,
        0,
    ]
    assert found["preemptions"] > 0
    assert found["sequences in a step, mean"] > 1


def test_changes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product of a single row is made different."""
    if not native.is_loaded() or not native.has_products(torch.bfloat16):
        pytest.skip("no native kernels here")

    def mutant(x: Tensor, packed: Tensor, outputs: int, *others: Tensor | None) -> Tensor:
        y = packed_linear(x, packed, outputs, *others)
        return y if x.shape[0] > 1 else y * 1.25

    monkeypatch.setattr(common.models.layers, "packed_linear", mutant)
    found = count()
    assert found["batch invariant"] == "no"
    tokens = [found["greedy answers with another token"], found["sampled answers with another token"]]
    assert min(tokens) > 0
    assert found["answers with other log-probabilities"] >= sum(tokens)


@pytest.mark.usefixtures("torch_kernels")
@pytest.mark.slow
def test_torch_is_measured_as_torch() -> None:
    found = count(native_kernels=False)
    assert (found["kernels"], found["batch invariant"]) == ("torch", "no")


def test_a_request_that_fails_is_no_answer() -> None:
    engine = build_engine("7", model=MODEL, device="cpu", max_seq_len=256)
    engine.runner.model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="a request failed"):
        batch_invariance.serve(engine, draw_orders(engine.tokenizer, 1, sampled=False))


def test_a_row_for_every_type_with_and_without_native_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[object, ...]] = []

    def measured(*arguments: object) -> list[object]:
        asked.append(arguments)
        return [*arguments[2:4], "k", "yes", 0, 0, 0, 1.5, 0]

    monkeypatch.setattr(batch_invariance, "in_new_process", measured)
    command_line.main(
        ["micro", "batch_invariance", "--models", "a", "b", "--requests", "7", "--out", str(tmp_path)]
    )
    assert asked == [
        (count_changes, "phase7_chunked", model, dtype, native_kernels, 7)
        for model in "ab"
        for native_kernels in (True, False)
        for dtype in ("bfloat16", "float32")
    ]
    (path,) = tmp_path.rglob("batch_invariance.json")
    assert '"7 greedy and 7 sampled"' in path.read_text()
    assert str(path.parent) in capsys.readouterr().out.replace("\n", "")
