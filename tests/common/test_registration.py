"""A phase that another project adds: one registration, and every program knows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PACKAGE = '''"""Phase 9 again."""

from common.startup.build import EngineBuilder
from common.engine.requests import Phase
from phase9_pipelined import Config, Pool, Runner, build_engine as pipelined
from phase9_pipelined.scheduler import PipelinedScheduler

PHASE = Phase(12, "phase12_copy", "A copy", "phase 9 again")


class Scheduler(PipelinedScheduler):
    """Changes nothing."""


build_engine = EngineBuilder(PHASE, Config, Scheduler, Runner, pipelined.pool)
'''

ASK = """
import sys
from common.llm import LLM
from infer import main

assert main(["phases"]) == 0
assert LLM("zoo:llama-tiny", phase=12).generate(["Once"])[0].token_ids
print("torch's compiler" if "torch._dynamo" in sys.modules else "no compiler")
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines of a process in which `phase12_copy`, installed outside of this project, is listed and used."""
    folder = tmp_path_factory.mktemp("elsewhere")
    package, metadata = folder / "phase12_copy", folder / "phase12_copy-1.dist-info"
    package.mkdir()
    metadata.mkdir()
    (package / "__init__.py").write_text(PACKAGE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: phase12-copy\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[infer.phases]\nphase12_copy = phase12_copy\n")
    path = os.pathsep.join([str(folder), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_registered_phase_is_listed_last_and_answers(said: list[str]) -> None:
    *phases, _ = said
    assert [line.split()[0] for line in phases] == ["4", "5", "6", "7", "8", "9", "10", "11", "12"]
    assert phases[-1].split(maxsplit=2)[1:] == ["phase12_copy", "phase 9 again"]


def test_an_engine_starts_without_torchs_compiler(said: list[str]) -> None:
    """Importing it takes seconds and 70 MB. Torch imports it for some calls that look harmless."""
    assert said[-1] == "no compiler"
