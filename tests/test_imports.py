"""Packages import only lower layers. (`pyproject.toml` has the rule within `common.server`, for `lint-imports`.)"""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

from common.startup.phases import phase_names

ROOT = Path(__file__).resolve().parents[1]

#: From the lowest layer to the highest. Packages of one layer do not import each other.
LAYERS = [
    {"kernels"},
    {"common"},
    *({phase} for phase in phase_names()),
    {"benchmarks"},
    {"cluster"},
    {"simulator"},
    {"infer", "tutor"},
]


@pytest.fixture(scope="module")
def imports() -> grimp.ImportGraph:
    return grimp.build_graph(*itertools.chain.from_iterable(LAYERS), cache_dir=None)


def test_dependencies_point_one_way(imports: grimp.ImportGraph) -> None:
    assert imports.find_illegal_dependencies_for_layers(layers=LAYERS[::-1]) == set()


@pytest.mark.parametrize("package", ["benchmarks", "cluster", "infer", "tutor"])
def test_a_program_finds_phases_by_name_or_over_http(imports: grimp.ImportGraph, package: str) -> None:
    for phase in phase_names():
        assert imports.find_shortest_chain(package, phase, as_packages=True) is None


@pytest.mark.slow
def test_a_servers_own_process_needs_no_torch() -> None:
    """Torch takes a second to import, and 300 MB. Only the engine's process computes."""
    modules = ["common.server.run", *phase_names()]
    imports = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", imports], cwd=ROOT, check=True)
