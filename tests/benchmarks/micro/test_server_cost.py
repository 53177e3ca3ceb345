"""A decode step alone and through the server: what is timed, and that both are given the same work."""

from __future__ import annotations

import pytest

from benchmarks.micro import server_cost
from benchmarks.micro.server_cost import (
    COLUMNS,
    engine_times,
    gap_s,
    measure,
    orders_of,
    step_time_s,
    target_of,
)
from benchmarks.workloads import PromptWriter
from common.phases import find_phase
from tests.benchmarks.conftest import record


def test_only_gaps_while_all_of_them_stream_are_timed() -> None:
    """The first has begun 3 s earlier and goes on 3 s longer, at a pace of its own."""
    early = record(0, 0.0, [1.0, 2.0, 3.0, 4.0, 4.5, 5.0, 5.5, 7.0, 9.0])
    late = record(1, 0.0, [4.0, 4.6, 5.2, 5.8])
    assert gap_s([early, late]) == pytest.approx(0.55)  # of 0.5 0.5 0.5 and 0.6 0.6 0.6
    assert gap_s([early]) == 1.0


def test_streams_that_never_meet_are_no_measurement() -> None:
    with pytest.raises(RuntimeError, match="never ran at once"):
        gap_s([record(0, 0.0, [1.0, 2.0]), record(1, 0.0, [3.0, 4.0])])


@pytest.mark.parametrize("phase", ["4", "7"])
def test_the_engine_alone_is_timed_on_any_phase(phase: str) -> None:
    target = target_of(phase, "zoo:llama-tiny", [1, 3])
    assert target.module is not None
    found = engine_times(target.module, target.options, [1, 3])
    assert set(found) == {1, 3}
    assert all(seconds > 0 for seconds in found.values())


def test_steps_that_prefill_are_not_timed(writer: PromptWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that jumps with prompt tokens. The third prompt passes beside the others' second tokens, so that step
    brings three tokens as well, and only one is left in which all three decode.
    """
    monkeypatch.setattr(server_cost, "NEW_TOKENS", 3)
    package = find_phase("7")
    engine = package.build_engine(
        package.Config(model="zoo:llama-tiny", dtype="float32", max_batch_size=3, max_seq_len=256)
    )
    now = [0.0]

    def clock() -> float:
        now[0] += 1000.0 if engine.telemetry.current.prefill_tokens else 1.0
        return now[0]

    monkeypatch.setattr(server_cost.time, "perf_counter", clock)
    assert step_time_s(engine, orders_of(writer, 3)) == 1.0
    assert not engine.has_work


def test_both_are_measured_in_turns_and_a_row_is_what_columns_say(
    writer: PromptWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = iter([{1: 0.010, 8: 0.020}, {1: 0.012, 8: 0.020}, {1: 0.011, 8: 0.020}])
    served = iter([{1: 0.020, 8: 0.020}, {1: 0.012, 8: 0.030}, {1: 0.033, 8: 0.040}])
    asked = []

    def engine(function: object, module: str, options: dict[str, str], streams: object) -> dict[int, float]:
        assert function is engine_times
        asked.append(("engine", module, options))
        return next(alone)

    def server(target: server_cost.Target, writer: PromptWriter, streams: object) -> dict[int, float]:
        asked.append(("server", str(target.module), target.options))
        return next(served)

    monkeypatch.setattr(server_cost, "in_new_process", engine)
    monkeypatch.setattr(server_cost, "server_times", server)
    rows = measure("7", "zoo:llama-tiny", [1, 8], 3)
    assert [who for who, *_ in asked] == ["engine", "server"] * 3
    assert len({str(what) for _, *what in asked}) == 1  # the same phase with the same options
    assert all(len(row) == len(COLUMNS) for row in rows)
    assert rows[0] == ["zoo:llama-tiny", 1, pytest.approx(11.0), pytest.approx(20.0), pytest.approx(2.0)]
    assert rows[1] == ["zoo:llama-tiny", 8, pytest.approx(20.0), pytest.approx(30.0), pytest.approx(1.5)]
    assert "ratio" in COLUMNS[-1]


@pytest.mark.slow
def test_processes_of_their_own(writer: PromptWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        server_cost, "NEW_TOKENS", 8
    )  # of the server's requests; the engine's process has its own
    (row,) = measure("7", "zoo:llama-tiny", [2], 1)
    assert all(isinstance(cell, float) and cell > 0 for cell in row[2:])
