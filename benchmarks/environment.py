"""Describes the machine of a measurement: hardware, package versions, git revision, cores that other programs use.

The description contains no names of hosts, users or folders.
"""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "numpy",
    "httpx",
    "uvicorn",
    "fastapi",
    "pydantic",
)

SAMPLE_S = 0.4
BUSY_SHARE = 0.15  # share of all cores; the programs of an idle desktop use less


def describe_environment() -> dict[str, Any]:
    """Return a description of this machine and its software, as results store it."""
    return {
        "cpu": cpu_name(),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "git": git_revision(),
    }


def cores() -> int:
    """Return the number of the machine's logical cores."""
    return psutil.cpu_count() or 1


def cores_taken() -> float:
    """Return how many cores are busy now. Blocks for `SAMPLE_S` seconds; call it while no server runs."""
    return float(psutil.cpu_percent(SAMPLE_S)) / 100 * cores()


def is_busy(taken: float) -> bool:
    """Return whether `taken` busy cores would distort a measurement."""
    return taken > BUSY_SHARE * cores()


def taken_in_words(taken: float) -> str:
    return f"other programs took {taken:.1f} of {cores()} cores"


def cpu_name() -> str:
    """Return the processor's name; only its architecture if the system does not tell the name."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def git_revision() -> str | None:
    """Return the checked-out commit, with a `+` at its end if files differ from it; None outside a repository."""
    here = Path(__file__).resolve().parent
    try:
        revision = _git(here, "rev-parse", "--short=12", "HEAD")
        # Result files are written during a measurement. They are no change of the code.
        changed = _git(here, "status", "--porcelain", "--", ":/", ":(exclude)results")
    except (OSError, subprocess.CalledProcessError):
        return None
    return revision + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
