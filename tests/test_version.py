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


@pytest.mark.parametrize(
    ("file", "line"),
    [("CITATION.cff", f"\nversion: {VERSION}\n"), ("mkdocs.yml", f"\ncopyright: infer {VERSION} #")],
)
def test_other_files_name_the_version(file: str, line: str) -> None:
    assert line in (ROOT / file).read_text(encoding="utf-8")


def test_the_installed_package_and_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.metadata.version("infer-phases") == VERSION
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"infer {VERSION}, torch ")
