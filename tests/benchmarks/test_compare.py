"""Whole comparisons, with scripted servers in the phases' place."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import benchmarks.__main__ as command_line
import benchmarks.compare
import benchmarks.environment
import benchmarks.measure
from benchmarks.compare import Comparison, compare
from benchmarks.files import load_comparisons, publish
from benchmarks.loadgen import generate_load
from benchmarks.measure import Measurement
from benchmarks.peers.registry import peer_target
from benchmarks.plots.groups import load_groups
from benchmarks.results import LOCAL, Run, is_complete
from benchmarks.servers import RunningServer, Setup, Target
from benchmarks.workloads import Lengths, PromptWriter, Workload
from tests.benchmarks.conftest import saved_runs
from tests.benchmarks.fake_server import FakeServer
from tests.benchmarks.test_servers import fake_target

TINY = Workload(
    "tiny",
    requests=6,
    prompts=((1.0, Lengths(4, 9)),),
    new_tokens=Lengths(5, 10),
    arrivals="uniform",
    rate=50.0,
)


@pytest.fixture(autouse=True)
def generator_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save the start of a process for every run. `test_loadgen.py` tests the generator's own process."""
    monkeypatch.setattr(
        benchmarks.measure, "run_load", lambda plan, progress: asyncio.run(generate_load(plan, progress))
    )


def run_comparison(
    targets: Sequence[Target], writer: PromptWriter, out: Path, *workloads: Workload, **changes: object
) -> tuple[list[Run], str]:
    comparison = Comparison(
        targets=targets,
        workloads=workloads or (TINY,),
        model="dummy:fake",
        writer=writer,
        measurement=Measurement(comparison="20260101-000000", stall_timeout_s=5.0),
        rate="table",
        out=out,
    )
    console = Console(record=True, width=140, quiet=False)
    runs = compare(replace(comparison, **changes), console)  # type: ignore[arg-type]
    return runs, console.export_text()


def test_two_servers_are_compared(tmp_path: Path, writer: PromptWriter) -> None:
    targets = [fake_target("phase 4", 4, gap=0.02), fake_target("phase 5", 5, gap=0.004)]
    runs, printed = run_comparison(targets, writer, tmp_path, repeats=2)
    # The order is reversed in the second repeat.
    assert [(run.server.label, run.repeat) for run in runs] == [
        ("phase 4", 1),
        ("phase 5", 1),
        ("phase 5", 2),
        ("phase 4", 2),
    ]
    assert all(run.status == "ok" for run in runs)
    assert command_line.exit_code(runs) == 0
    assert "phase 4" in printed
    assert "tokens / s" in printed
    # Both got the same requests.
    work = [[(r.prompt_tokens, r.max_tokens, r.scheduled_s) for r in run.requests] for run in runs]
    assert all(each == work[0] for each in work)
    saved = saved_runs(tmp_path)
    assert sorted(run.file_name for run in saved) == sorted(run.file_name for run in runs)
    assert {run.model_dump_json() for run in saved} == {run.model_dump_json() for run in runs}
    assert f"4 runs written to {tmp_path}" in printed
    (together,) = load_comparisons(tmp_path)
    assert together.folder == ""
    assert is_complete(together.runs)
    assert [group.name for group in load_groups(tmp_path)] == ["tiny-fake"]


def test_servers_that_start_together_are_measured_in_turn(tmp_path: Path, writer: PromptWriter) -> None:
    """Two servers start at a time. The second does not start, which leaves the others' runs as they are."""
    targets = [
        fake_target("phase 4", 4),
        fake_target("phase 5", 5, exit_at_once=3),
        fake_target("phase 6", 6),
    ]
    runs, printed = run_comparison(targets, writer, tmp_path, started_together=2)
    assert [(run.server.label, run.status) for run in runs] == [
        ("phase 4", "ok"),
        ("phase 5", "failed"),
        ("phase 6", "ok"),
    ]
    assert "phase 5 ended (exit 3)" in printed
    assert [run.server.exit_code for run in runs] == [0, None, 0]


def test_no_launched_server_outlives_a_comparison_that_is_stopped(
    tmp_path: Path, writer: PromptWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[RunningServer] = []
    launch = RunningServer.launch

    def noted(server: RunningServer) -> None:
        launched.append(server)
        launch(server)

    def stopped(*arguments: object) -> Run:
        assert [server.exit_code for server in launched] == [None, None]  # both answer before one is measured
        raise KeyboardInterrupt

    monkeypatch.setattr(RunningServer, "launch", noted)
    monkeypatch.setattr(benchmarks.compare, "run_once", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_comparison([fake_target("a", 4), fake_target("b", 5)], writer, tmp_path, started_together=2)
    assert [server.exit_code for server in launched] == [0, 0]


@pytest.mark.slow
def test_a_comparison_that_is_stopped_is_known_to_be_cut_short(
    tmp_path: Path, writer: PromptWriter, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A comparison is stopped in its second repeat. Its files say that more runs belong to it."""
    run_once = benchmarks.compare.run_once

    def stopped(*arguments: object) -> Run:
        if len(list(tmp_path.glob("*.json"))) == 3:
            raise KeyboardInterrupt
        return run_once(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(benchmarks.compare, "run_once", stopped)
    targets = [fake_target("phase 4", 4), fake_target("phase 5", 5)]
    with pytest.raises(KeyboardInterrupt):
        run_comparison(targets, writer, tmp_path, repeats=2)
    assert f"3 of 4 runs written to {tmp_path}" in capsys.readouterr().out
    (together,) = load_comparisons(tmp_path)
    assert len(together.runs) == 3
    assert not is_complete(together.runs)
    assert load_groups(tmp_path) == []
    # If the second of two workloads is stopped, the first one counts as complete.
    for path in tmp_path.glob("*.json"):
        path.unlink()
    with pytest.raises(KeyboardInterrupt):
        run_comparison(targets, writer, tmp_path, TINY, replace(TINY, name="second"))
    assert [group.name for group in load_groups(tmp_path)] == ["tiny-fake"]


@pytest.mark.slow
def test_a_run_beside_busy_programs_says_so(
    tmp_path: Path, writer: PromptWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Load is measured before the first run and after each. The runs before and after a busy moment get a note."""
    looks = iter([0.0, 0.0, 1.5, 0.0, 0.0])
    monkeypatch.setattr(benchmarks.compare, "cores_taken", lambda: next(looks))
    monkeypatch.setattr(benchmarks.environment, "cores", lambda: 2)
    targets = [fake_target(f"phase {number}", number) for number in (4, 5, 6, 7)]
    runs, printed = run_comparison(targets, writer, tmp_path)
    said = "other programs took 1.5 of 2 cores before or after run 1"
    assert [said in run.notes for run in runs] == [False, True, True, False]
    assert all(run.status == "ok" for run in runs)
    assert [said in run.notes for run in saved_runs(tmp_path)] == [False, True, True, False]
    assert f"phase 5: {said}" in printed
    assert "just now" not in printed

    looks = iter([1.9, 0.0])
    _, printed = run_comparison(targets[:1], writer, tmp_path)
    assert "other programs took 1.9 of 2 cores just now" in printed


def test_servers_whose_addresses_end_alike_have_files_of_their_own(
    tmp_path: Path, writer: PromptWriter
) -> None:
    with FakeServer() as one, FakeServer() as other:
        targets = [peer_target(f"{server.url}/v1", Setup()) for server in (one, other)]
        run_comparison(targets, writer, tmp_path)
    (published,) = publish(tmp_path, tmp_path / "out")
    assert set(published.labels) == {f"{one.url}/v1", f"{other.url}/v1"}


def test_a_result_holds_everything(tmp_path: Path, writer: PromptWriter) -> None:
    run_comparison([fake_target("phase 4", 4)], writer, tmp_path)
    (path,) = tmp_path.glob("*.json")
    assert path.name == "tiny-fake-20260101-000000-phase-4-r1.json"
    found = json.loads(path.read_text())
    assert found["metrics"]["completed"] == 6
    assert found["metrics"]["output_tokens"] == sum(r["max_tokens"] for r in found["requests"])
    assert (
        found["server_metrics"]["steps"] == found["metrics"]["output_tokens"]
    )  # one step for each token, without the warm-up
    assert len(found["engine_steps"]["started_s"]) == found["server_metrics"]["steps"]
    for request in found["requests"]:
        assert len(request["token_times_s"]) == request["max_tokens"] == request["completion_tokens"]
        assert request["scheduled_s"] <= request["sent_s"] < request["token_times_s"][0]
    assert 0 <= found["engine_steps"]["started_s"][0] < found["requests"][0]["token_times_s"][0]
    assert "torch" in found["environment"]["packages"]
    assert (found["calibration"]["mode"], found["calibration"]["factor"]) == ("table", 1.0)
    assert found["generator"]["cpu_s"] > 0
    assert (found["server"]["exit_code"], found["server"]["options"]) == (0, {})
    assert (found["workload"]["rate"], found["workload"]["seed"]) == (50.0, 0)


@pytest.mark.slow
def test_auto_calibrates_once_on_the_first_server(tmp_path: Path, writer: PromptWriter) -> None:
    """A batch of two requests with 10 tokens × 10 ms takes about 0.1 s: some 20 requests a second."""
    slow = fake_target("phase 4", 4, first=0.01, gap=0.01, limit=2)
    even = replace(TINY, new_tokens=Lengths(10, 10))
    targets = [slow, fake_target("phase 5", 5)]
    runs, _ = run_comparison(targets, writer, tmp_path, even, rate="auto", batch=2, load=1.0)
    calibrations = [run.calibration for run in runs]
    assert calibrations[0] == calibrations[1]
    assert calibrations[0] is not None
    assert calibrations[0].capacity is not None
    assert 5 < calibrations[0].capacity < 21
    assert calibrations[0].measured_on == "phase 4"
    assert runs[0].workload.rate == pytest.approx(calibrations[0].capacity)
    assert runs[0].metrics is not None
    assert runs[0].metrics.arrival_rate == pytest.approx(calibrations[0].capacity, rel=0.15)


def test_a_phase_that_is_started_here_traces_itself(tmp_path: Path, writer: PromptWriter) -> None:
    peer = replace(fake_target("a peer"), order=100.0)
    runs, _ = run_comparison([fake_target("phase 4", 4), peer], writer, tmp_path, trace=True)
    path = (tmp_path / runs[0].file_name).with_suffix(".trace")
    assert f"recorded meanwhile: {path.name}" in runs[0].notes
    assert path.read_text() == "traced"
    assert runs[0].server.options == {}  # results show no folders
    assert "no trace: only a phase that is started here records one" in runs[1].notes
    assert [run.status for run in runs] == ["ok", "ok"]


def test_a_server_that_dies_or_does_not_start_fails_its_run_alone(
    tmp_path: Path, writer: PromptWriter
) -> None:
    dies, never = fake_target("phase 4", 4, die_after=16 + 12), fake_target("phase 6", 6, exit_at_once=2)
    runs, printed = run_comparison([dies, fake_target("phase 5", 5), never], writer, tmp_path)
    assert [run.status for run in runs] == ["failed", "ok", "failed"]
    assert command_line.exit_code(runs) == 1
    assert "the server ended during the run (exit 7)" in (runs[0].reason or "")
    assert runs[0].metrics is not None
    assert runs[0].metrics.errors > 0
    assert runs[0].server.exit_code == 7
    assert "phase 4, tiny: failed" in printed
    assert saved_runs(tmp_path)[0].status == "failed"  # failed runs are kept
    assert "--frobnicate is not possible here" in (runs[2].reason or "")
    assert runs[2].metrics is None


def test_failed_requests_make_a_run_incomplete(tmp_path: Path, writer: PromptWriter) -> None:
    with FakeServer() as server:
        first_ids = {}
        complete = server.app.complete

        async def every_third_fails(body, stream):  # type: ignore[no-untyped-def]
            first_ids[len(first_ids)] = body["prompt"][0]
            if len(first_ids) % 3 == 0:
                server.app.plain(stream, 503, {"error": {"message": "full"}})
            else:
                await complete(body, stream)

        server.app.complete = every_third_fails  # type: ignore[method-assign]
        runs, _ = run_comparison([Target("there", 100, None, {}, url=server.url)], writer, tmp_path)
    (run,) = runs
    assert run.status == "incomplete"
    assert run.metrics is not None
    assert (run.metrics.completed, run.metrics.errors) == (4, 2)
    assert run.reason == "2 of 6 requests failed: HTTP 503: full"
    assert command_line.exit_code(runs) == 1


def test_short_answers_make_a_run_incomplete(tmp_path: Path, writer: PromptWriter) -> None:
    """A server that ends answers early has less work than the others."""
    with FakeServer() as server:
        complete = server.app.complete

        async def one_token_less(body, stream):  # type: ignore[no-untyped-def]
            await complete(body | {"max_tokens": body["max_tokens"] - 1}, stream)

        server.app.complete = one_token_less  # type: ignore[method-assign]
        target = Target("there", 100, None, {}, url=server.url)
        (run,), _ = run_comparison([target], writer, tmp_path)
        assert (run.status, run.reason) == ("incomplete", "6 answers are shorter than asked for")
        (run,), _ = run_comparison([target], writer, tmp_path, ignore_eos=False)
        assert run.status == "ok"  # full length was not required


# ---------------------------------------------------------------------------------------------- command line


def test_run_measures_any_server_into_the_readers_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with FakeServer() as server:
        arguments = ["run", "--server", server.url, "--tokenizer", "zoo:llama-tiny", "--workload", "mixed"]
        assert command_line.main([*arguments, "--quick", "--label", "fake"]) == 0
        assert all(body["model"] == "fake" for body in server.app.bodies)
    (run,) = saved_runs(tmp_path / "benchmarks" / "results" / "local")
    assert (run.server.label, run.server.options, run.workload.quick) == ("fake", None, True)
    assert f"1 runs written to {LOCAL}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compare", "--phases", "99"], "99"),
        (["compare", "--workload", "nonsense"], "nonsense"),
        (["compare", "--phases", "", "--workload", "mixed"], "nothing to compare"),
        (["compare", "--peer", "nobody"], "nobody"),
        (["compare", "--option", "num-blocks=4"], "PHASE:NAME=VALUE"),
        (["compare", "--variant", "7"], "PHASE:NAME=VALUE"),
        (["compare", "--variant", "7:prefill-chunk-size="], "NAME=VALUE"),
        (["compare", "--variant", "99:seed=1"], "99"),
        (["compare", "--model", "dummy:nothing"], "nothing"),
        (["run", "--server", "http://127.0.0.1:1"], "names no model"),
        (["plots", "--results", "/nowhere/at/all"], "no such folder"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(arguments) == 2
    printed = capsys.readouterr().err
    assert "error:" in printed
    assert said in printed
    assert "Traceback" not in printed


def test_options_and_variants_are_parsed() -> None:
    given = ["6:num-blocks=512", "6:--block-size=4", "all:dtype=float32"]
    assert command_line.parse_options(given) == {
        "6": {"num-blocks": "512", "block-size": "4"},
        "all": {"dtype": "float32"},
    }
    assert command_line.parse_variant("7:prefill-chunk-size=64,--no-mixed-batches") == (
        "7",
        {"prefill-chunk-size": "64", "no-mixed-batches": ""},
    )
