"""Makes public functions of `docs/building` callable from pages, as macros between double braces."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the program `mkdocs` does not look for modules in this folder by itself

MODULES = ("charts", "code", "options", "overrides", "stepper", "tables", "worked")


def define_env(env: Any) -> None:
    """Register the macros. The plugin mkdocs-macros calls this.

    Raises:
        AssertionError: two modules have a function of the same name.
    """
    seen: set[str] = set()
    for module in (importlib.import_module(f"docs.building.{name}") for name in MODULES):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not name.startswith("_"):
                assert name not in seen, f"{module.__name__}.{name} exists in another module"
                seen.add(name)
                env.macro(function)
