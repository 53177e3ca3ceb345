"""Finds phases by name or number. `common` itself names no phase.

A package `phaseN_idea` beside `common` is a phase by its name alone. A package of another project registers itself
by an entry point of the group `infer.phases`; its name must have the same form.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from common.errors import StartupError

if TYPE_CHECKING:  # slow to import, some with torch; the names of the phases are known without them
    from common.engine.config import EngineConfig
    from common.engine.engine import Engine
    from common.engine.requests import Phase
    from common.startup.build import EngineBuilder

GROUP = "infer.phases"

_ROOT = Path(__file__).resolve().parents[2]
_NAME = re.compile(r"phase(\d+)_\w+")


class PhasePackage(Protocol):
    """The names that every phase's package exports. (The package also exports `Scheduler`, `Runner` and `Pool`.)"""

    PHASE: Phase
    Config: type[EngineConfig]
    build_engine: EngineBuilder[EngineConfig]


def phase_names() -> list[str]:
    """Return the registered phases' module names, lowest number first."""
    beside = {path.parent.name for path in _ROOT.glob("phase*_*/__init__.py")}
    names = beside | _registered_elsewhere()
    return sorted((name for name in names if _NAME.fullmatch(name)), key=phase_number)


@functools.cache  # a file of every installed distribution is read
def _registered_elsewhere() -> frozenset[str]:
    return frozenset(entry.value for entry in entry_points(group=GROUP))


def phases_in_words() -> str:
    """Return the registered phases as text, for error messages."""
    return f"{', '.join(phase_names())}, by name or number"


def phase_number(module: str) -> int:
    """Return the number in a phase's module name."""
    match = _NAME.fullmatch(module)
    assert match is not None, module
    return int(match[1])


def find_phase(name: int | str) -> PhasePackage:
    """Return a phase by its number (`4`, `"4"`), its module name (`phase4_static`), or a unique part of that name.

    A phase that is not registered is found by its full module name only.

    Raises:
        StartupError: no phase, or more than one, matches.
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


def build_engine(phase: int | str, config: EngineConfig) -> Engine:
    """Build an engine of the phase that `find_phase` finds. Raises StartupError as `EngineBuilder` does."""
    return find_phase(phase).build_engine(config)


def lazy_names(module: str) -> Callable[[str], Any]:
    """Return a package's `__getattr__` (PEP 562): it takes names from `module`, which it imports at first use.

    So a process that needs a phase's name and options, and none of its classes, imports no torch.
    """

    def find(name: str) -> Any:
        if name.startswith("__"):  # asked for by Python itself, such as `__path__` of every module
            raise AttributeError(name)
        return getattr(importlib.import_module(module), name)

    return find


def _import_unregistered(name: str) -> PhasePackage:
    """Import an unregistered phase by its full module name. StartupError: there is no such phase."""
    unknown = StartupError(f"no phase {name!r}; there are {phases_in_words()}")
    if not all(part.isidentifier() for part in name.split(".")):
        raise unknown
    try:
        package = importlib.import_module(name)
    except ModuleNotFoundError:
        raise unknown from None
    from common.engine.requests import Phase  # which a phase has imported

    if not isinstance(getattr(package, "PHASE", None), Phase):  # some other module
        raise unknown
    return package
