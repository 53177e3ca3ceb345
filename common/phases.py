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


def phases_in_words() -> str:
    """The registered phases for a message that refuses something else."""
    return f"{', '.join(phase_names())}, by name or number"


def _phase_number(module: str) -> int:
    return int("".join(itertools.takewhile(str.isdigit, module.removeprefix("phase"))) or 0)


def find_phase(name: int | str) -> PhasePackage:
    """A phase by its number (`4`, `"4"`), by its module name (`phase4_static`), or by as much of that as is unique.

    Raises:
        StartupError: no phase, or more than one, answers to that.
    """
    name = str(name)
    names = phase_names()
    if name.isdecimal():
        matches = [module for module in names if _phase_number(module) == int(name)]
    else:
        matches = [module for module in names if module == name] or [m for m in names if name in m]
    if len(matches) == 1:
        return importlib.import_module(matches[0])
    if matches:
        raise StartupError(f"{name!r} could be {', '.join(matches)}")
    return _import_unregistered(name)


def _import_unregistered(name: str) -> PhasePackage:
    """A phase that is named in full because no entry point names it."""
    unknown = StartupError(f"no phase {name!r}; there are {phases_in_words()}")
    if not all(part.isidentifier() for part in name.split(".")):
        raise unknown
    try:
        package = importlib.import_module(name)
    except ModuleNotFoundError:
        raise unknown from None
    if not isinstance(getattr(package, "PHASE", None), Phase):  # some other module
        raise unknown
    return package
