"""Finding a phase by name. `common` names no phase.

A phase is registered by its package's place and name, `phaseN_idea` beside `common`. A package of another project
registers itself by an entry point of the group `infer.phases`.
"""

from __future__ import annotations

import importlib
import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from common.build import EngineBuilder
from common.config import EngineConfig
from common.engine import Phase
from common.errors import StartupError

GROUP = "infer.phases"

_ROOT = Path(__file__).resolve().parents[1]
_NAME = re.compile(r"phase(\d+)_\w+")


class PhasePackage(Protocol):
    """What every phase's package exports (and its `Scheduler` and `Runner`, for readers and tests)."""

    PHASE: Phase
    Config: type[EngineConfig]
    build_engine: EngineBuilder[EngineConfig]


def phase_names() -> list[str]:
    """Return the registered phases' module names, lowest number first."""
    beside = {path.parent.name for path in _ROOT.glob("phase*_*/__init__.py")}
    elsewhere = {entry.value for entry in entry_points(group=GROUP)}
    return sorted((name for name in beside | elsewhere if _NAME.fullmatch(name)), key=phase_number)


def phases_in_words() -> str:
    """The registered phases for a message that refuses something else."""
    return f"{', '.join(phase_names())}, by name or number"


def phase_number(module: str) -> int:
    """Return the number in a phase's module name."""
    match = _NAME.fullmatch(module)
    assert match is not None, module
    return int(match[1])


def find_phase(name: int | str) -> PhasePackage:
    """A phase by its number (`4`, `"4"`), by its module name (`phase4_static`), or by as much of that as is unique.

    Raises:
        StartupError: no phase, or more than one, answers to that.
    """
    name = str(name)
    names = phase_names()
    if name.isdecimal():
        matches = [module for module in names if phase_number(module) == int(name)]
    else:
        matches = [module for module in names if module == name] or [m for m in names if name in m]
    if len(matches) == 1:
        return importlib.import_module(matches[0])
    if matches:
        raise StartupError(f"{name!r} could be {', '.join(matches)}")
    return _import_unregistered(name)


def _import_unregistered(name: str) -> PhasePackage:
    """Import a phase that is named in full because it is not registered."""
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
