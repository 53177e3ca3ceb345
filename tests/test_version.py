"""All other files name the version that `pyproject.toml` has."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

from infer import main

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def test_the_top_heading_of_the_changelog() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0].rstrip(",") == VERSION


def test_the_citation() -> None:
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_site() -> None:
    assert f"\ncopyright: infer {VERSION} #" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_the_installed_package_and_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.metadata.version("infer-phases") == VERSION
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"infer {VERSION}, torch ")
