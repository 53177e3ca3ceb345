"""The threads that share the native kernels: errors, callers at the same time, forked processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.grouped import Form, Layout, grouped_linear, grouped_rows
from tests.kernels.support import FP32, draw
from tests.kernels.test_grouped import draw_groups, packed

pytestmark = pytest.mark.usefixtures("native_kernels")

FORM, OUTPUTS, INPUTS = Form(4, blocks=1), 1000, 512
TASKS = Path("/proc/self/task")
ROOT = Path(__file__).parents[2]


@pytest.fixture(params=[2, 3, 40])
def several_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """The number of threads of a kernel: the last is more than the machine has cores, and the kernel has tasks."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def panels() -> Tensor:
    return packed(draw_groups(FORM, OUTPUTS, INPUTS), FORM)


LAYOUT = Layout.of(INPUTS, (OUTPUTS,), (FORM,))


@pytest.mark.usefixtures("several_threads")
def test_an_error_of_a_task_reaches_the_caller(panels: Tensor) -> None:
    rows = torch.arange(OUTPUTS).repeat(4)
    expected = grouped_rows(rows, panels, LAYOUT, FP32)
    for wrong in (0, len(rows) // 2, len(rows) - 1):
        damaged = rows.clone()
        damaged[wrong] = 2 * OUTPUTS
        with pytest.raises(RuntimeError, match="there is no row 2000"):
            grouped_rows(damaged, panels, LAYOUT, FP32)
        assert torch.equal(grouped_rows(rows, panels, LAYOUT, FP32), expected)


@pytest.mark.usefixtures("several_threads")
def test_callers_at_the_same_time(panels: Tensor) -> None:
    rows = [draw(count, INPUTS, seed=count) for count in range(1, 9)]
    expected = [grouped_linear(x, panels, LAYOUT) for x in rows]
    for x, found in zip(rows * 50, _at_once(rows * 50, panels), strict=True):
        assert torch.equal(found, expected[len(x) - 1])


def _at_once(rows: list[Tensor], panels: Tensor) -> list[Tensor]:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda x: grouped_linear(x, panels, LAYOUT), rows))


@pytest.mark.skipif(not TASKS.exists(), reason="needs Linux's list of a process's threads")
def test_a_forked_process_has_threads_of_its_own(panels: Tensor, several_threads: int) -> None:
    x = draw(3, INPUTS)
    expected = grouped_linear(x, panels, LAYOUT)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            equal = all(torch.equal(grouped_linear(x, panels, LAYOUT), expected) for _ in range(20))
            os.write(write, f"{equal} {len(list(TASKS.iterdir()))}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        assert said.read() == f"True {several_threads}"
    os.waitpid(child, 0)
    assert torch.equal(grouped_linear(x, panels, LAYOUT), expected)


BOUND = """
import time
from pathlib import Path

import kernels.native
import torch

kernels.native.require_native_kernels()
torch.set_num_threads(2)
weight, x = torch.randn(2048, 2048), torch.randn(64, 2048)
tasks = set(Path("/proc/self/task").iterdir())
packed = torch.ops.infer.pack_linear(weight, 1)
(other,) = set(Path("/proc/self/task").iterdir()) - tasks


def seconds(task):
    return int((task / "schedstat").read_text().split()[0]) / 1e9


while seconds(other) < 0.2 * time.process_time():  # one that only waited for work would sleep
    torch.ops.infer.linear(x, packed, 2048, None, None, False)
print((other / "status").read_text())
"""


@pytest.mark.skipif(not TASKS.exists(), reason="needs Linux's list of a process's threads")
@pytest.mark.slow
@pytest.mark.parametrize("variables", [{}, {"OMP_PROC_BIND": "true"}, {"GOMP_CPU_AFFINITY": "0"}], ids=str)
def test_another_thread_computes_on_any_core(variables: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BOUND],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    allowed = re.findall(r"Cpus_allowed_list:.*", Path("/proc/self/status").read_text())
    assert re.findall(r"Cpus_allowed_list:.*", done.stdout) == allowed
