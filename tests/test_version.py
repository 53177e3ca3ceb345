"""All other files name the version that `pyproject.toml` has."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from mkdocs.config.defaults import MkDocsConfig

from docs.building import hook
from infer import main
from tests.server.support import ServerProcess

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def test_the_top_heading_of_the_changelog() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0].rstrip(",") == VERSION


def test_the_citation() -> None:
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_site() -> None:
    assert f"\ncopyright: infer {VERSION} #" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_only_the_site_of_mike_has_a_switch_between_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables, expected in (
        ({}, {}),
        ({"MIKE_DOCS_VERSION": VERSION}, {"version": {"provider": "mike"}}),
    ):
        monkeypatch.delenv("MIKE_DOCS_VERSION", raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        config = MkDocsConfig()
        config.extra = {}
        hook.on_config(config)
        assert config.extra == expected


def test_the_installed_package_and_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.metadata.version("infer-phases") == VERSION
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith(f"infer {VERSION}, torch ")


def test_a_server() -> None:
    process = ServerProcess("phase9_pipelined")
    try:
        assert process.client.get("/version").json()["version"] == VERSION
        assert process.client.get("/openapi.json").json()["info"]["version"] == VERSION
    finally:
        process.close()
