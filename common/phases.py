"""Finding a phase by name. `common` names none: they register under an entry point group, or are named in full."""

from __future__ import annotations

import importlib
import itertools
from importlib.metadata import entry_points
from typing import Protocol

from common.build import EngineBuilder
from common.config import EngineConfig
from common.engine import Phase
from common.errors import StartupError

GROUP = "infer.phases"


class PhasePackage(Protocol):
    """What every phase's package exports (and its `Scheduler` and `Runner`, for readers and tests)."""

    PHASE: Phase
    Config: type[EngineConfig]
    build_engine: EngineBuilder[EngineConfig]


def phase_names() -> list[str]:
    """The registered phases' module names, lowest number first."""
    return sorted((entry.value for entry in entry_points(group=GROUP)), key=_phase_number)


def _phase_number(module: str) -> int:
    return int("".join(itertools.takewhile(str.isdigit, module.removeprefix("phase"))) or 0)


def find_phase(name: str) -> PhasePackage:
    """A phase by its module name (`phase4_static`), or by as much of it as is unique (`4`, `static`, `phase4`).

    Raises:
        StartupError: no phase, or more than one, answers to that.
    """
    matches = [module for module in phase_names() if name in module]
    exact = [module for module in matches if module == name]
    if exact or len(matches) == 1:
        return importlib.import_module((exact or matches)[0])
    if matches:
        raise StartupError(f"{name!r} could be {', '.join(matches)}")
    try:
        return importlib.import_module(name)  # not registered, named in full
    except ModuleNotFoundError:
        raise StartupError(f"no phase {name!r}; there are {', '.join(phase_names())}") from None
