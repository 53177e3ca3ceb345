"""Decode steps in the form for a GPU's graphs: indices in one tensor, padded rows, tensors that stay in place."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels.attention
import phase9_pipelined
import phase9_pipelined.runner
import phase9_pipelined.seats
from common.devices.streams import CudaStream, Pending, ThreadStream
from common.models.layers import CausalLM
from common.request import SamplingParams
from kernels.dispatch import HAS_TRITON
from kernels.tape import Function
from phase9_pipelined.config import graph_sizes
from tests.support.engines import (
    add,
    assert_all_free,
    assert_answered,
    build,
    greedy,
    model_config,
    run,
    tiny_model,
    tokens_of,
)
from tests.support.streams import StandIns, runner_of


class RowStream(ThreadStream):
    """Runs work by rows in stand-ins for graphs.

    Attributes:
        keys: the keys of all submitted work.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.graphs = StandIns(sizes)
        self.keys: list[Any] = []

    def submit(
        self,
        key: Hashable,
        function: Function,
        inputs: Sequence[Tensor],
        after: Pending | None = None,
        *,
        fetch: bool = True,
        by_row: bool = False,
        rows: int | None = None,
    ) -> Pending:
        self.keys.append(key)
        if by_row:
            return super().submit(key, lambda *given: self.graphs.run(key, function, given), inputs, after)
        return super().submit(key, function, inputs, after, fetch=fetch)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch, torch_kernels: None) -> None:
    """Decode on a CPU with Triton's kernel in the interpreter."""
    for module in (kernels.attention, phase9_pipelined.runner):
        monkeypatch.setattr(module, "use_triton", lambda _: True)


def in_the_interpreter(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that decodes on a CPU with Triton's kernels."""
    for mark in (
        pytest.mark.skipif(not HAS_TRITON, reason="Triton is not published for this platform"),
        pytest.mark.skipif(
            torch.cuda.is_available(), reason="Triton compiles for the GPU, and these models are not on it"
        ),
        pytest.mark.usefixtures("interpreted"),
    ):
        test = mark(test)
    return test


def one_layer() -> CausalLM:
    """A model of one layer: the interpreter is slow."""
    return tiny_model(layers=model_config().layers[:1])


@in_the_interpreter
@pytest.mark.parametrize("depth", [*(pytest.param(depth, marks=pytest.mark.slow) for depth in (0, 1)), 2])
def test_rows_that_fill_up_change_nothing(depth: int) -> None:
    """Sequences come and go, blocks are reused, and a batch of five rows is padded to six."""
    model = one_layer()
    options = {"pipeline_depth": depth, "max_batch_size": 6, "block_size": 4, "num_blocks": 24}
    engine = build("phase9_pipelined", model, **options)
    stream = runner_of(engine).stream = RowStream([1, 2, 4, 6])
    lengths = (2, 5, 8, 4, 6, 3, 4)
    requests = [
        add(engine, [(5 * i + j) % 250 for j in range(3 + i)], greedy(length, ignore_eos=True))
        for i, length in enumerate(lengths)
    ]
    assert_answered(run(engine), requests, model)
    captured = stream.graphs.captured_rows
    assert {4, 6} <= set(captured)
    assert len(set(captured)) == len(captured)
    assert_all_free(engine)


@in_the_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("prefill_chunk_size", [4, 64])
def test_tokens_are_drawn_in_the_graph(prefill_chunk_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are drawn with each seat's own parameters and random numbers, which are sent three at a time. Cases:
    after a preemption, at a reused seat, beside requests that are sampled after the graph, and beside chunks."""
    monkeypatch.setattr(phase9_pipelined.seats, "UNIFORMS", 3)
    model = tiny_model()
    options = {
        "max_batch_size": 4,
        "block_size": 4,
        "num_blocks": 13,
        "prefill_chunk_size": prefill_chunk_size,
    }
    engine = build("phase9_pipelined", model, **options)
    stream = runner_of(engine).stream = RowStream([2, 4])
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 1},
        {"seed": 2, "top_p": 0.8},
        {"seed": 3, "top_k": 20, "min_p": 0.02},
        {"seed": 4, "temperature": 1.3},
        {"seed": 5, "top_p": 0.9, "frequency_penalty": 0.5},
        {"seed": 6, "top_k": 3},
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"seed": 7, "logprobs": 2, "min_tokens": 3},
    ]
    requests = [
        add(
            engine,
            [(7 * i + j) % 250 for j in range(3 + 2 * i)],
            SamplingParams(max_new_tokens=8 + i % 3, ignore_eos=True, **kind),
        )
        for i, kind in enumerate(kinds)
    ]
    assert_answered(run(engine), requests, model)
    assert any(request.preemptions for request in requests)
    assert set(stream.graphs.captured_rows) == {2, 4}
    assert_all_free(engine)


@in_the_interpreter
@pytest.mark.slow
def test_a_failed_graph_leaves_no_wrong_state_on_the_device() -> None:
    """After the failure, the host assumes nothing about the device's state, and sends it again."""
    model = one_layer()
    engine = build("phase9_pipelined", model, max_batch_size=3, block_size=4, num_blocks=40)
    runner = runner_of(engine)
    runner.stream = RowStream([3])
    kinds: list[dict[str, Any]] = [{"top_k": 9}, {"frequency_penalty": 0.9}, {}]
    params = [
        SamplingParams(max_new_tokens=6, ignore_eos=True, seed=i, **kind) for i, kind in enumerate(kinds)
    ]
    requests = [add(engine, [5 + i, 6, 7], each) for i, each in enumerate(params)]
    decode, passes = runner._decode, iter(range(100))

    def fails_once(seats: Tensor, **kind: bool) -> tuple[Tensor, Tensor, Tensor]:
        results = decode(seats, **kind)
        if next(passes) == 3:
            raise RuntimeError("the pass fails after it has moved lengths on")
        return results

    runner._decode = fails_once  # type: ignore[method-assign]
    assert_answered(run(engine), requests, model)
    assert engine.telemetry.counters.failed_passes == 1


@in_the_interpreter
@pytest.mark.slow
def test_guesses_are_verified_by_the_paged_kernel() -> None:
    """Decode, guesses and chunks of prompts run in one launch."""
    model = tiny_model()
    options = {"max_batch_size": 3, "block_size": 4, "num_blocks": 40, "prefill_chunk_size": 8}
    engine = build("phase10_speculative", model, draft_length=4, draft_rows=12, **options)
    prompts = [[5, 6, 7, 8] * 3, [9, 1] * 4, list(range(40, 52))]
    params = [greedy(9, ignore_eos=True), greedy(9, ignore_eos=True, frequency_penalty=0.2)]
    requests = [add(engine, prompt, params[i % 2]) for i, prompt in enumerate(prompts)]
    assert_answered(run(engine), requests, model)
    assert engine.telemetry.counters.draft_tokens > 10
    assert_all_free(engine)


@pytest.mark.gpu
def test_a_graph_holds_for_any_number_of_rows_up_to_its_own() -> None:
    stream = CudaStream(torch.device("cuda"), graph_sizes(32))
    kept = torch.arange(10.0, device="cuda")
    torch.cuda.synchronize()  # the stream under test waits for no other stream
    called: list[int] = []

    def look_up(rows: Tensor) -> tuple[Tensor]:
        called.append(len(rows))
        return (kept[rows[:, 0]] * rows[:, 1],)

    for count in (3, 4, 1, 3, 20, 300, 2):
        rows = torch.stack([torch.arange(count) % 10, torch.arange(count) + 1], dim=1)
        first = stream.submit("look up", look_up, [rows], fetch=False, by_row=True)
        behind = stream.submit("double", lambda x: (x * 2,), [], first)
        assert behind.wait()[0].tolist() == [2 * (i % 10) * (i + 1) for i in range(count)]
    kept.zero_()
    torch.cuda.synchronize()
    assert not stream.submit("look up", look_up, [rows], by_row=True).wait()[0].any(), "read when replayed"
    # Each size has a call and a capture. Above the largest size there is only the call.
    assert called == [4, 4, 1, 1, 32, 32, 300, 2, 2]
    assert not stream.graphs.failed


@pytest.mark.gpu
def test_a_capture_that_fails_disables_its_size_alone() -> None:
    stream = CudaStream(torch.device("cuda"), [2, 4])
    inputs = torch.tensor([[2], [3]])

    def double(rows: Tensor) -> tuple[Tensor]:
        if len(rows) == 2:
            rows.sum().item()  # a capture may not wait for the device
        return (rows * 2,)

    for failed in ({("double", 2)}, {("double", 2)}):
        assert stream.submit("double", double, [inputs], by_row=True).wait()[0].tolist() == [[4], [6]]
        assert stream.graphs.failed == failed
    stream.graphs.clear()
    healthy = stream.submit("double", lambda rows: (rows * 2,), [inputs], by_row=True)
    assert healthy.wait()[0].tolist() == [[4], [6]]
    assert not stream.graphs.failed


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_captured_or_called_the_tokens_are_the_same(depth: int) -> None:
    def tokens(**options: Any) -> list[list[int]]:
        config = phase9_pipelined.Config(
            model="zoo:llama-tiny",
            device="cuda",
            dtype="float32",
            max_seq_len=128,
            max_batch_size=6,
            num_blocks=48,
            pipeline_depth=depth,
            **options,
        )
        engine = phase9_pipelined.build_engine(config)
        stream = runner_of(engine).stream
        assert isinstance(stream, CudaStream)
        params = [
            SamplingParams(
                temperature=0.0 if i % 2 else 0.8,
                frequency_penalty=0.0 if i < 6 else 0.5,
                seed=i,
                max_new_tokens=20 + i,
            )
            for i in range(9)
        ]
        requests = [add(engine, [7 + i, 8, 9 + i], each) for i, each in enumerate(params)]
        outputs = run(engine)
        assert stream.graphs.sizes == ((1, 2, 4, 6) if options.get("captured_steps", True) else ())
        assert not stream.graphs.failed
        assert_all_free(engine)
        return [tokens_of(outputs, request) for request in requests]

    assert tokens() == tokens(captured_steps=False)
