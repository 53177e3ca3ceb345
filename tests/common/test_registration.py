"""A phase that another project adds: one registration, and every program knows it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]

PACKAGE = '''"""Phase 9 again."""

from common.startup.build import EngineBuilder
from common.engine.engine import Phase
from phase9_pipelined import Config, Pool, Runner, build_engine as pipelined
from phase9_pipelined.scheduler import PipelinedScheduler

PHASE = Phase(11, "phase11_copy", "A copy", "phase 9 again")


class Scheduler(PipelinedScheduler):
    """Changes nothing."""


build_engine = EngineBuilder(PHASE, Config, Scheduler, Runner, pipelined.pool)
'''
MAIN = 'from common.server.run import main\n\nif __name__ == "__main__":\n    main("phase11_copy")\n'


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of a process that finds `phase11_copy`, installed outside of this project."""
    folder = tmp_path_factory.mktemp("elsewhere")
    package, metadata = folder / "phase11_copy", folder / "phase11_copy-1.dist-info"
    package.mkdir()
    metadata.mkdir()
    (package / "__init__.py").write_text(PACKAGE)
    (package / "__main__.py").write_text(MAIN)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: phase11-copy\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[infer.phases]\nphase11_copy = phase11_copy\n")
    path = os.pathsep.join([str(folder), str(ROOT)])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def python(environment: dict[str, str], *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_registered_phase_is_listed_last(registered: dict[str, str]) -> None:
    lines = python(registered, "-m", "infer", "phases").splitlines()
    assert [line.split()[0] for line in lines] == ["4", "5", "6", "7", "8", "9", "10", "11"]
    assert lines[-1].split(maxsplit=2)[1:] == ["phase11_copy", "phase 9 again"]


@pytest.fixture
def served(registered: dict[str, str]) -> Iterator[str]:
    command = [sys.executable, "-m", "infer", "serve", "11", "--model", "zoo:llama-tiny", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, env=registered, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        ready = next(line for line in process.stderr if "http://" in line)
        yield "http://" + ready.partition("http://")[2].split()[0].rstrip("/,;.")
        process.terminate()
        process.stderr.read()


def test_a_server_answers(served: str) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, "stream": False}
    answer = httpx.post(f"{served}/v1/completions", json=body, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert httpx.get(f"{served}/health", timeout=60).status_code == 200
