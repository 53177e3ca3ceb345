"""Describes the machine and its packages for the GPU run: `python -m benchmarks.gpu.environment`.

Prints one JSON object. `missing` lists the packages that the run needs and that are not installed: those of
`pyproject.toml`, and the requirements of installed packages. The program itself needs only the standard library. It
imports torch and `packaging` if they are installed.
"""

from __future__ import annotations

import json
import platform
import re
import tomllib
from collections import deque
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

#: Packages that the tests need, beside the project's own requirements.
TESTS_NEED = ("pytest", "hypothesis", "jsonschema")
BESIDE = ("transformers", "triton")


def requirements(project: Path = ROOT / "pyproject.toml") -> list[str]:
    """Return the packages that the run needs, as `pyproject.toml` requires them."""
    content = tomllib.loads(project.read_text())["project"]
    extra = [
        each for each in content["optional-dependencies"]["dev"] if name_of(each) in (*TESTS_NEED, *BESIDE)
    ]
    return [each.partition(";")[0].strip() for each in (*content["dependencies"], *extra)]


def name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def version_of(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def missing_below(packages: Iterable[str]) -> list[str]:
    """Return the requirements of installed packages, direct and indirect, that are not installed.

    If packages were copied one by one, their requirements may be missing. Without the library `packaging`, the list
    is empty.

    Args:
        packages: names of installed packages.
    """
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:
        return []
    names, found = deque(packages), dict[str, str]()
    seen = set(names)
    while names:
        for line in metadata.requires(names.popleft()) or []:
            needed = Requirement(line)
            if needed.name in seen or (needed.marker and not needed.marker.evaluate({"extra": ""})):
                continue
            seen.add(needed.name)
            if version_of(needed.name) is None:
                found[needed.name] = f"{needed.name}{needed.specifier}"
            else:
                names.append(needed.name)
    return sorted(found.values())


def describe() -> dict[str, Any]:
    """Return the machine, the versions, and the packages that are missing."""
    required = requirements()
    found = {name_of(each): version_of(name_of(each)) for each in required}
    missing = [each for each in required if found[name_of(each)] is None]
    missing += missing_below(name for name, version in found.items() if version)
    described: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.platform(),
        "versions": {name: version for name, version in found.items() if version},
        "missing": missing,
        "gpu": None,
    }
    if found["torch"] is not None:
        import torch

        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(0)
            described["gpu"] = {
                "name": properties.name,
                "memory": properties.total_memory,
                "processors": properties.multi_processor_count,
                "capability": f"{properties.major}.{properties.minor}",
                "cuda": torch.version.cuda,
            }
    return described


if __name__ == "__main__":
    print(json.dumps(describe(), indent=1))
