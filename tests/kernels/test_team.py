"""The threads that share the native kernels: errors, callers at the same time, forked processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.grouped import Form, Layout, grouped_linear, grouped_rows
from tests.kernels.support import FP32, draw
from tests.kernels.test_grouped import draw_groups, packed

pytestmark = pytest.mark.usefixtures("native_kernels", "several_threads")

FORM, OUTPUTS, INPUTS = Form(4, blocks=1), 1000, 512
TASKS = Path("/proc/self/task")


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


def test_an_error_of_a_task_reaches_the_caller(panels: Tensor) -> None:
    rows = torch.arange(OUTPUTS).repeat(4)
    expected = grouped_rows(rows, panels, LAYOUT, FP32)
    for wrong in (0, len(rows) // 2, len(rows) - 1):  # in the part of each thread
        damaged = rows.clone()
        damaged[wrong] = 2 * OUTPUTS
        with pytest.raises(RuntimeError, match="there is no row 2000"):
            grouped_rows(damaged, panels, LAYOUT, FP32)
        assert torch.equal(grouped_rows(rows, panels, LAYOUT, FP32), expected)


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
        equal = all(torch.equal(grouped_linear(x, panels, LAYOUT), expected) for _ in range(20))
        os.write(write, f"{equal} {len(list(TASKS.iterdir()))}".encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        assert said.read() == f"True {min(several_threads, len(LAYOUT.table))}"
    os.waitpid(child, 0)
    assert torch.equal(grouped_linear(x, panels, LAYOUT), expected)
