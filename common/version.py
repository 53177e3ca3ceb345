"""The version of this project."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def project_version() -> str:
    """Return the version of the installed package, or the version in `pyproject.toml` if it is not installed."""
    try:
        return importlib.metadata.version("infer-phases")
    except importlib.metadata.PackageNotFoundError:
        project: dict[str, str] = tomllib.loads(PYPROJECT.read_text())["project"]
        return project["version"]
