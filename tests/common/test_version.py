"""The version, of the installed package and of a tree that is not installed."""

from __future__ import annotations

import importlib.metadata

import pytest

from common.version import project_version


def test_the_tree_and_the_installed_package_have_one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = project_version()

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert project_version() == installed
