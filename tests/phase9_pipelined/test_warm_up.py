"""The warm-up: the passes that are recorded before the first client, and the number of threads that play them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import phase9_pipelined
from common.devices.streams import TapeStream
from common.engine.scheduling import StepPlan
from common.request import SamplingParams
from common.startup.warm_up import capture
from kernels import native
from phase9_pipelined.config import graph_sizes
from tests.support.engines import assert_all_free, run
from tests.support.pools import caching
from tests.support.streams import StandIns, runner_of

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
        assert engine.add_request(engine.maker.create([5, 6, 7], params))
    outputs = run(engine)
    assert [output.error for output in outputs if output.finished] == [None] * 3


@needs_native
def test_a_pass_whose_recording_fails_is_computed_without_a_tape() -> None:
    """If a recording fails during a request, its pass is computed without a tape."""
    engine = zoo_engine()
    plain = engine.maker.create(
        [5, 6, 7], SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
    )
    odd = engine.maker.create([5, 6, 8], SamplingParams(temperature=0.0, max_new_tokens=12, logprobs=3))
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


@needs_native
def test_a_small_model_leaves_the_host_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    streams = [runner_of(zoo_engine()).stream]
    monkeypatch.setattr("phase9_pipelined.runner.SMALL_MODEL_BYTES", 1)
    streams.append(runner_of(zoo_engine()).stream)
    assert [stream.threads for stream in streams if isinstance(stream, TapeStream)] == [3, 4]


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
