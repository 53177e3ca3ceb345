"""pytest's option `--solution`: the checks judge the solution at a file's end, not the task at its beginning."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--solution", action="store_true", help="judge the solutions at the end of the files")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    """With `--solution`, replace the first definition of each file (the task) by the last one (the solution)."""
    if config.getoption("--solution"):
        for module in {item.module for item in items}:
            own = [name for name, each in vars(module).items() if _module_of(each) == module.__name__]
            setattr(module, own[0], getattr(module, own[-1]))


def _module_of(value: object) -> str:
    return getattr(value, "__module__", "")
