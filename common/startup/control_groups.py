"""Finds the Linux control groups (a container's limits) around this process, and limits threads to their quota."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import torch

logger = logging.getLogger(__name__)


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """Yield the version (1 or 2) and the folder of each control group around this process. A folder may be missing.

    Args:
        controller: "memory" or "cpu".
        root: the folder that holds `proc` and `sys`.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            version, mount = 1, root / "sys/fs/cgroup" / controller
        elif controllers == "":
            version, mount = 2, root / "sys/fs/cgroup"
        else:
            continue
        # In a container the path may be the host's, while the mount shows the container's own group as its root.
        names = Path(path).parts[1:]
        for depth in range(len(names) + 1):
            yield version, mount.joinpath(*names[:depth])


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the number of CPUs whose time the control groups allow; None: there is no quota.

    Args:
        root: the folder that holds `proc` and `sys`.
    """
    quotas = []
    for version, group in control_groups("cpu", root):
        try:
            if version == 1:
                quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            else:
                quota, period = (group / "cpu.max").read_text().split()
        except OSError:  # a group without the controller, or not visible in this container
            continue
        if quota.strip() not in ("max", "-1"):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def limit_threads() -> None:
    """Let torch compute with no more threads than the quota of CPUs, unless `OMP_NUM_THREADS` says how many.

    With more, the kernel stops all threads for the rest of each period, in the middle of a pass.
    """
    if "OMP_NUM_THREADS" in os.environ or (quota := cpu_quota()) is None:
        return
    threads = max(1, int(quota))
    if threads < torch.get_num_threads():
        torch.set_num_threads(threads)
        logger.info(
            "%d threads compute, since the quota is %g CPUs (OMP_NUM_THREADS sets another number)",
            threads,
            quota,
        )
