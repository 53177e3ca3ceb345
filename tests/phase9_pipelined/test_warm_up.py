"""The warm-up: the passes that are recorded before the first client, and the number of threads that play them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import phase9_pipelined
from common.devices.graphs import graph_sizes
from common.devices.streams import Pending, TapeStream, ThreadStream
from common.devices.work_times import Work
from common.engine.scheduling import StepPlan
from common.request import Request, SamplingParams
from common.startup.warm_up import FEW_ROWS, capture, record
from kernels import native
from kernels.tape import Function
from tests.support.engines import assert_all_free, run
from tests.support.graphs import StandIns
from tests.support.pools import caching
from tests.support.streams import runner_of

needs_native = pytest.mark.skipif(not native.is_loaded(), reason="no native kernels here")


def zoo_engine(**options: Any) -> Any:
    settings = {
        "model": "zoo:llama-tiny",
        "dtype": "float32",
        "max_seq_len": 96,
        "block_size": 1,
        "num_blocks": 100,
    }
    return phase9_pipelined.build_engine(phase9_pipelined.Config(**(settings | options)))


@needs_native
def test_no_client_waits_for_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = zoo_engine()
    assert_all_free(engine)
    assert caching(engine).allocator.num_free == 100, "nothing of it is found by others"
    assert engine.telemetry.counters.steps == 0

    def recorded_late(*_: object) -> None:
        raise AssertionError("recorded while a client waits")

    monkeypatch.setattr("common.devices.streams.record", recorded_late)
    for params in (
        SamplingParams(temperature=0.0, max_new_tokens=8),
        SamplingParams(temperature=0.7, max_new_tokens=8),
        SamplingParams(top_p=0.5, top_k=9, max_new_tokens=8),
    ):
        assert engine.add_request(engine.create_request([5, 6, 7], params))
    outputs = run(engine)
    assert [output.error for output in outputs if output.finished] == [None] * 3


@needs_native
def test_a_recording_that_fails_late_fails_nobody_else() -> None:
    """If a recording fails during a request, its pass is computed without a tape."""
    engine = zoo_engine()
    plain = engine.create_request(
        [5, 6, 7], SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
    )
    odd = engine.create_request([5, 6, 8], SamplingParams(temperature=0.0, max_new_tokens=12, logprobs=3))
    for each in (plain, odd):
        assert engine.add_request(each)
    with pytest.MonkeyPatch.context() as patch:

        def broken(*_: object) -> None:
            raise RuntimeError("no tape left")

        patch.setattr("common.devices.streams.record", broken)
        outputs = run(engine)
    assert [output.error for output in outputs if output.finished] == [None, None], (
        "computed one by one, without it"
    )
    assert engine.telemetry.counters.failed_passes > 0


def test_steps_may_be_called_from_python() -> None:
    engine = zoo_engine(captured_steps=False)
    assert isinstance(runner_of(engine).stream, ThreadStream)
    assert engine.add_request(
        engine.create_request([5, 6], SamplingParams(max_new_tokens=5, ignore_eos=True))
    )
    assert len(run(engine)) == 5


class TimedStream(TapeStream):
    """A stream whose passes take the given milliseconds, by their rows: with one thread less, and with all."""

    def __init__(self, passes_ms: dict[int, tuple[float, float]]) -> None:
        super().__init__()
        self.few_rows = None
        self.passes_ms = passes_ms
        self.played: list[Work] = []

    def submit(
        self, key: Hashable, function: Function, inputs: Sequence[Tensor], *others: Any, **options: Any
    ) -> Pending:
        if self.few_rows is not None:
            one_less, with_all = self.passes_ms[options["rows"]] if key == "forward" else (0.001, 0.001)
            ms = one_less if options["rows"] <= self.few_rows else with_all
            self.played.append(Work(key, 10.0, 10.0 + ms / 1e3))
        return super().submit(key, function, inputs, *others, **options)

    def take_times(self) -> list[Work]:
        played, self.played = self.played, []
        return played


LONGEST = 256 + 8  # rows of a pass: a chunk of a prompt, and a token of each other sequence


@needs_native
@pytest.mark.parametrize(
    ("passes_ms", "few"),
    [
        ({1: (10, 8)}, 0),
        ({1: (8.1, 8), 2: (8.2, 8), 4: (10, 8)}, 2),
        ({1: (7, 8), 2: (8.5, 8)}, 1),
        ({1: (7, 8), 2: (31, 31)}, 1),
        ({1: (7, 8), 2: (7, 8), 4: (8.37, 8), 8: (8.47, 8)}, 4),  # 0.02 ms more for each row
        # With more rows than there are seats (8), a pass has a prompt: 4 ms more for its request.
        ({1: (7, 8), 2: (7, 8), 4: (7, 8), 8: (8.45, 8), 16: (12.45, 8), 32: (12.47, 8)}, 16),
        (dict.fromkeys((*FEW_ROWS, LONGEST), (9, 9)), LONGEST),
    ],
)
def test_rows_are_few_while_the_host_gains_more(passes_ms: dict[int, tuple[float, float]], few: int) -> None:
    runner = runner_of(zoo_engine(max_seq_len=300, num_blocks=300, max_batch_size=8, prefill_chunk_size=256))
    runner.stream = stream = TimedStream(passes_ms)
    record(runner, stream)
    assert stream.few_rows == few


@needs_native
def test_no_pass_is_longer_than_a_sequence_may_be() -> None:
    engine = zoo_engine(max_seq_len=3, max_batch_size=1)
    runner = runner_of(engine)
    runner.stream = stream = TimedStream(dict.fromkeys(FEW_ROWS, (7, 8)))
    record(runner, stream)
    assert stream.few_rows == 2
    assert engine.telemetry.counters.failed_passes == 0


@needs_native
def test_no_pass_is_longer_than_passes_may_be() -> None:
    """Memory is estimated for passes of a chunk and of the sequences that decode."""
    runner = runner_of(zoo_engine(max_batch_size=2, prefill_chunk_size=8))
    runner.stream = stream = TimedStream(dict.fromkeys((1, 2, 4, 8, 10), (7, 8)))
    record(runner, stream)
    assert stream.few_rows == runner.config.max_pass_tokens() == 10


@needs_native
def test_a_number_of_threads_that_was_asked_for_is_kept() -> None:
    stream = runner_of(zoo_engine(pass_threads=3)).stream
    assert isinstance(stream, TapeStream)
    assert (stream.threads, stream.few_rows) == (3, 0)


@needs_native
def test_a_pool_too_small_to_try_is_no_reason_to_fail() -> None:
    engine = zoo_engine(num_blocks=1, max_seq_len=2)
    request = Request("small", [3], SamplingParams(max_new_tokens=1))
    assert engine.add_request(request)
    assert run(engine)[-1].error is None


def test_graphs_are_captured_up_to_the_seats(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest graph is captured first. A second call captures all again, also the one that failed."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    engine = zoo_engine(captured_steps=False, max_batch_size=24)
    runner, broken = runner_of(engine), {24}
    graphs = StandIns(graph_sizes(24), fails=broken.__contains__)
    execute = runner.execute

    def in_graphs(plan: StepPlan) -> Any:
        if plan.decode:
            graphs.run("decode", lambda rows: (rows,), [torch.zeros(len(plan.decode), 1)])
        return execute(plan)

    monkeypatch.setattr(runner, "execute", in_graphs)
    capture(runner, graphs)
    assert graphs.captured_rows == [24, 16, 8, 4, 2, 1]
    assert graphs.failed == {("decode", 24)}
    broken.clear()
    capture(runner, graphs)
    assert graphs.captured_rows == [24, 16, 8, 4, 2, 1] * 2
    assert not graphs.failed
    assert_all_free(engine)
