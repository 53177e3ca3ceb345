"""Targets of `make`, run in a small tree: files that are made, kept and removed."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.docs.support import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")

OLD, NEW, NEWEST = 1_000_000_000, 1_000_000_100, 1_000_000_200
DRAWS = "-m benchmarks plots"


def make(tree: Path, *arguments: str) -> str:
    done = subprocess.run(["make", *arguments], cwd=tree, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small tree with an environment, results, and figures that are newer than them."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    files = ("pyproject.toml", "constraints.txt", ".venv/base", ".venv/full", "benchmarks/report.py")
    files += ("benchmarks/results.py", "benchmarks/plots/figures.py", "benchmarks/results/a-r1.json")
    files += ("benchmarks/results/h200/b-r1.json", "docs/assets/plots/captions.json")
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for path in tmp_path.rglob("*"):
        os.utime(path, (OLD, OLD))
    os.utime(tmp_path / "docs/assets/plots/captions.json", (NEW, NEW))
    return tmp_path


def test_figures_are_not_drawn_again_while_their_results_stay(tree: Path) -> None:
    for target in ("plots", "docs", "docs-serve"):
        assert DRAWS not in make(tree, "-n", target)
    assert "mkdocs build" in make(tree, "-n", "docs")


@pytest.mark.parametrize(
    "changed", ["benchmarks/results/h200/b-r1.json", "benchmarks/plots/figures.py", "benchmarks/report.py"]
)
def test_figures_are_drawn_again_when_their_sources_change(tree: Path, changed: str) -> None:
    os.utime(tree / changed, (NEWEST, NEWEST))
    assert DRAWS in make(tree, "-n", "docs")


@pytest.mark.parametrize("gone", ["benchmarks/results/h200/b-r1.json", "docs/assets/plots/captions.json"])
def test_figures_are_drawn_again_when_a_result_or_the_figures_are_gone(tree: Path, gone: str) -> None:
    (tree / gone).unlink()
    assert DRAWS in make(tree, "-n", "docs")


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ((), True),
        (("NVIDIA_DRIVER=/proc/driver/nvidia/version",), False),
        (("PIP_ARGS=--find-links wheels",), False),
        (("TORCH_CPU_INDEX=http://127.0.0.1:9",), False),  # nothing listens there
    ],
)
def test_the_cpu_build_of_torch_is_taken_where_its_index_is_reached(
    tree: Path, given: tuple[str, ...], taken: bool
) -> None:
    (tree / ".venv/base").unlink()
    (tree / "index/torch").mkdir(parents=True)
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tree / "index"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as index:
        threading.Thread(target=index.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{index.server_port}"
        asked = make(tree, "-n", f"TORCH_CPU_INDEX={address}", "NVIDIA_DRIVER=", *given, ".venv/base")
        index.shutdown()
    assert (f"--extra-index-url {address} -c constraints.txt" in asked) is taken
    assert ("--extra-index-url" in asked) is taken


def test_tests_take_an_order(tree: Path) -> None:
    assert make(tree, "-n", "test", "ARGS=--order-seed=7").endswith(" --order-seed=7\n")


def test_clean_removes_what_was_built_and_nothing_that_was_measured(tree: Path) -> None:
    built = ["site", "build", "infer.egg-info", "docs/assets/plots", "common/__pycache__"]
    built += [f".{name}_cache" for name in ("pytest", "mypy", "ruff", "import_linter")]
    built += [".hypothesis", ".schemathesis"]
    for name in built:
        (tree / name).mkdir(parents=True, exist_ok=True)
    own = tree / "benchmarks/results/local/own-r1.json"
    own.parent.mkdir()
    own.touch()
    kept = [".venv/full", "benchmarks/results/a-r1.json", "common", "docs/assets"]
    (tree / ".venv/lib/__pycache__").mkdir(parents=True)
    make(tree, "clean")
    assert [name for name in built if (tree / name).exists()] == []
    assert all((tree / name).exists() for name in kept)
    assert (tree / ".venv/lib/__pycache__").exists()
    assert own.exists()
    make(tree, "distclean")
    assert not (tree / ".venv").exists()
    assert own.exists()


def test_make_alone_prints_the_targets_and_runs_nothing(tree: Path) -> None:
    shutil.rmtree(tree / ".venv")
    said = make(tree)
    assert not (tree / ".venv").exists()
    for target in ("demo", "serve", "test", "check PHASE=6", "docs-serve"):
        assert f"  make {target} " in said


@pytest.mark.parametrize(
    ("words", "python"), [([], ".venv/bin/python"), (["PYTHON=./python3"], "./python3")], ids=["own", "named"]
)
def test_make_gpu_runs_a_named_interpreter_or_the_environments_own(
    tree: Path, words: list[str], python: str
) -> None:
    for path in (tree / ".venv/bin/python", tree / "python3"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('#!/bin/sh\necho "$0 $*"\n')
        path.chmod(0o755)
    said = make(tree, "gpu", "OUT=a folder", "STAGE=2", *words)
    assert said.splitlines()[-1] == f"{python} -m benchmarks.gpu --out a folder --stage 2"


@pytest.mark.parametrize(("judged", "expected"), [(0, 0), (1, 0), (2, 2)])
def test_a_test_that_fails_is_no_error_of_make_check(tree: Path, judged: int, expected: int) -> None:
    """`make check` fails only if the tests could not be run."""
    python = tree / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho the report\nexit {judged}\n")
    python.chmod(0o755)
    for path in python.parents:
        if path != tree and path.is_relative_to(tree):
            os.utime(path, (OLD, OLD))
    done = subprocess.run(["make", "check", "PHASE=6"], cwd=tree, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (expected, "the report\n")
    assert ("Error" in done.stderr) == (expected != 0)
