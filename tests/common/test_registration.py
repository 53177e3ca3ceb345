"""A phase that another project adds: one registration, and every program knows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


ASK = """
from common.llm import LLM
from infer import main

assert main(["phases"]) == 0
assert LLM("zoo:llama-tiny", phase=11).generate(["Once"])[0].token_ids
"""


def test_a_registered_phase_is_listed_last_and_answers(tmp_path: Path) -> None:
    """`phase11_copy` is installed outside of this project."""
    package, metadata = tmp_path / "phase11_copy", tmp_path / "phase11_copy-1.dist-info"
    package.mkdir()
    metadata.mkdir()
    (package / "__init__.py").write_text(PACKAGE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: phase11-copy\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[infer.phases]\nphase11_copy = phase11_copy\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["4", "5", "6", "7", "8", "9", "10", "11"]
    assert lines[-1].split(maxsplit=2)[1:] == ["phase11_copy", "phase 9 again"]
