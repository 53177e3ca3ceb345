"""The GPU run: its stages at toy sizes on a CPU, programs that fail or hang, and its verdicts."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import environment
from benchmarks.gpu.__main__ import examine, main, run_stage, summarise
from benchmarks.gpu.claims import claims
from benchmarks.gpu.environment import ROOT, name_of, requirements
from benchmarks.gpu.stages import STAGE_S, Program, Stage, stages
from benchmarks.micro import ENTRIES, find, parser
from common.models.presets import PRESETS

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: `make gpu` itself is the test")


@on_cpu
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_stage_runs_at_toy_sizes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Errors that a CPU can show must not first show on a borrowed GPU."""
    code = main(["--out", str(tmp_path)])
    shown = capfd.readouterr().out
    assert code == 0, shown
    assert (tmp_path / "summary.txt").read_text() in shown
    assert "no figure here says anything about a GPU" in shown
    names = {path.stem for path in (tmp_path / "tables").iterdir()}
    assert names == {
        "gpu_steps_llama-1m",
        "gpu_transformers_llama-1m",
        "gpu_attention",
        "offline",
        "gpu_timeline",
    }
    assert len(list((tmp_path / "traces").iterdir())) == 5
    assert sorted(path.name for path in tmp_path.glob("stage-*.json")) == [
        f"stage-{n}.json" for n in range(1, 7)
    ]


def test_every_program_of_the_full_run_has_arguments_that_it_takes() -> None:
    """Only a GPU can run these programs to their ends, but their arguments are checked here."""
    for toy in (False, True):
        table = stages(toy=toy)
        assert list(table) == [1, 2, 3, 4, 5, 6]
        for stage in table.values():
            for program in stage.programs:
                module, *words = shlex.split(program.words.format(out="results"))
                if module == "pytest":
                    assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))
                elif words[0] == "micro":
                    assert words[1] in ENTRIES
                    options = vars(parser(words[1], find(words[1])).parse_args(words[2:]))
                    models = [options["model"]] if "model" in options else options.get("models", [])
                    assert all(model.removeprefix("dummy:") in PRESETS for model in models)
                else:
                    from benchmarks.__main__ import parser as commands

                    commands("benchmarks").parse_args(words)


def test_the_runner_needs_nothing_but_the_standard_library() -> None:
    """A borrowed machine may lack packages, and this program must report which."""
    said = subprocess.run(
        [sys.executable, "-S", "-c", "import benchmarks.gpu.__main__"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr


def test_missing_packages_are_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    answer = {"gpu": None, "versions": {"torch": "2.11"}, "missing": ["pydantic>=2.11", "orjson>=3.10"]}
    done = subprocess.CompletedProcess([], 0, stdout=json.dumps(answer), stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert examine(tmp_path) == answer
    shown = capfd.readouterr().out
    assert "MISSING, and what needs them will fail: pydantic>=2.11, orjson>=3.10" in shown
    assert "--target .gpu-packages 'pydantic>=2.11' 'orjson>=3.10'" in shown


def test_requirements_are_those_of_the_project_and_of_its_tests() -> None:
    names = {name_of(each) for each in requirements()}
    assert {"torch", "pydantic", "huggingface-hub", "pytest", "hypothesis", "triton", "transformers"} <= names
    assert "mypy" not in names


def run(stage: Stage, out: Path, deadline_s: float) -> list[dict[str, Any]]:
    (out / "logs").mkdir()
    return list(run_stage(9, stage, out, deadline_s, interpreted=False))


@pytest.mark.slow
def test_a_failure_or_a_hang_stops_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that ignores SIGTERM is killed together with its child."""
    (tmp_path / "hangs.py").write_text(
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "while True: pass\n"
    )
    (tmp_path / "fails.py").write_text("raise ValueError('on purpose')")
    (tmp_path / "works.py").write_text("print('fine')")
    programs = tuple(
        Program(
            name, f"timeit -n 1 -r 1 -s 'import runpy' 'runpy.run_path(\"{tmp_path}/{name}.py\")'", seconds
        )
        for name, seconds in (("fails", 60), ("hangs", 2), ("works", 60))
    )
    fails, hangs, works = run(Stage("three", programs), tmp_path, time.monotonic() + 600)
    assert (fails["ended"], works["ended"]) == ("exit 1", "ok")
    assert fails["last"].endswith("ValueError: on purpose")
    assert hangs["ended"] == "killed at 2 s"


def test_a_budget_that_is_used_up_starts_nothing(tmp_path: Path) -> None:
    (result,) = run(Stage("late", (Program("late", "this"),)), tmp_path, time.monotonic())
    assert result["ended"] == "no time left"


def test_limits_leave_a_stage_under_eight_minutes() -> None:
    assert STAGE_S < 480
    assert all(
        program.seconds <= STAGE_S
        for toy in (False, True)
        for stage in stages(toy=toy).values()
        for program in stage.programs
    )


def write_table(out: Path, name: str, columns: list[str], rows: list[list[Any]]) -> None:
    (out / "tables").mkdir(exist_ok=True)
    (out / "tables" / f"{name}.json").write_text(json.dumps({"columns": columns, "rows": rows}))


def test_claims_without_results_are_neither_held_nor_refuted(tmp_path: Path) -> None:
    assert {verdict for _, verdict in claims(tmp_path)} == {"no result"}


def test_claims_follow_the_results(tmp_path: Path) -> None:
    columns = ["way", "sequences", "tokens / s", "share of the roofline"]
    rows = [
        ["9 captured", 1, 100.0, 0.75],
        ["9 captured", 8, 700.0, 0.69],
        ["9 captured", 64, 900.0, 0.3],
        ["9 pipelined", 8, 900.0, 0.9],
    ]
    write_table(tmp_path, "gpu_steps_llama-3.2-1b", columns, rows)
    write_table(
        tmp_path, "gpu_transformers_llama-3.2-1b", ["sequences", "tokens / s"], [[8, 300.0], [64, 1.0]]
    )
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "1-tests.log").write_text(
        "tests/gpu/test_engines.py::test_bits[a] PASSED [ 1%]\n"
        "tests/gpu/test_engines.py::test_bits[b] PASSED\n"
        "tests/kernels/test_rope.py::test_it FAILED [ 9%]\n"
        "ERROR tests/common/test_streams.py - ModuleNotFoundError: x\n"
    )
    found = dict(claims(tmp_path))
    assert found["kernels, graphs, streams and phases pass their tests"] == (
        "NOT HELD: 2 passed, 1 failed, 1 modules not read"
    )
    assert found["bits are the same alone and beside others"].startswith("held: 2 passed, 0 failed")
    assert found["llama-3.2-1b: 70% of the roofline, 1 to 8 rows, captured"] == "NOT HELD: at the least 69%"
    assert found["llama-3.2-1b: 2 × the continuous batching of transformers"] == "held: at the least 3.0 ×"
    assert found["qwen3-0.6b: 2 × the continuous batching of transformers"] == "no result"


def test_claims_read_the_log_of_several_processes_too(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "1-tests.log").write_text(
        "tests/gpu/test_engines.py::test_bits[a] \n"
        "[gw3] [  1%] PASSED tests/gpu/test_engines.py::test_bits[a] \n"
        "[gw1] [ 50%] FAILED tests/gpu/test_engines.py::test_bits[b] \n"
        "[gw0] [100%] PASSED tests/kernels/test_rope.py::test_it \n"
    )
    found = dict(claims(tmp_path))
    assert found["kernels, graphs, streams and phases pass their tests"].startswith(
        "NOT HELD: 2 passed, 1 failed"
    )
    assert found["bits are the same alone and beside others"].startswith("NOT HELD: 1 passed, 1 failed")


def test_what_an_installed_package_lacks_is_missing_too(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {
        "web": ["router>=2", "tracing>=1.4", 'old; python_version < "3"', 'extra-thing; extra == "all"'],
        "router": ["paths>=3,<4"],
    }
    monkeypatch.setattr(environment.metadata, "requires", needs.get)
    monkeypatch.setattr(environment, "version_of", lambda name: "1.0" if name in ("web", "router") else None)
    assert environment.missing_below(["web"]) == ["paths<4,>=3", "tracing>=1.4"]


def test_the_table_at_the_end_covers_earlier_runs_of_other_stages(tmp_path: Path) -> None:
    for number in (1, 4):
        result = {"name": "works", "ended": "ok", "seconds": 3.0}
        (tmp_path / f"stage-{number}.json").write_text(json.dumps({"title": "any", "programs": [result]}))
    lines = list(summarise(tmp_path, {"gpu": {"name": "H100"}}))
    assert lines[0] == "on H100"
    assert [line.split()[0] for line in lines[1:3]] == ["stage-1", "stage-4"]
