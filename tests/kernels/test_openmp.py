"""How long idle OpenMP workers spin: the limit that libgomp reads when it is loaded, and its effect on steps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.openmp import SPIN_ROUNDS, VARIABLES

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torch brings libgomp on Linux only")

ENTRY_POINTS = [
    ["-c", "from common.llm import LLM"],
    ["-c", "from phase8_prefix.build import Runner"],
    ["-m", "benchmarks", "micro", "kv_cache", "--help"],
    ["-c", "import kernels.attention"],
    ["-c", "import simulator"],
]


def spin_rounds(arguments: list[str]) -> list[str]:
    """Start a process. Returns the GOMP_SPINCOUNT that each copy of libgomp in it has read."""
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=inherited | {"PYTHONPATH": str(ROOT), "OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return re.findall(r"GOMP_SPINCOUNT = '(\w+)'", done.stderr)


@pytest.mark.parametrize(
    "arguments",
    [pytest.param(each, marks=() if "kernels" in each[1] else pytest.mark.slow) for each in ENTRY_POINTS],
    ids=" ".join,
)
def test_libgomp_is_loaded_with_the_limit(arguments: list[str]) -> None:
    assert spin_rounds(arguments) == [str(SPIN_ROUNDS)]
