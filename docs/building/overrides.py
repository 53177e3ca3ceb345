"""Tables of the methods that phases override, one table each for schedulers, runners and pools.

The methods are read from the classes.
"""

from __future__ import annotations

import inspect

from common.startup.phases import find_phase, phase_names
from docs.building.markdown import table


def classes_of(phase: str) -> dict[str, type]:
    """Return the classes of a phase's scheduler, runner and pool, by these names."""
    package = find_phase(phase)
    return {"scheduler": package.Scheduler, "runner": package.Runner, "pool": package.Pool}


def overrides_table(role: str) -> str:
    """Return a table with a row for each method that a phase defines and a column for each phase. A cell links to
    the class whose method runs in that phase.

    Args:
        role: `scheduler`, `runner` or `pool`.
    """
    classes = {find_phase(phase).PHASE.number: classes_of(phase)[role] for phase in phase_names()}
    named = ", ".join(f"{number} {_link(cls.__name__, cls)}" for number, cls in classes.items())
    rows = [
        [f"`{name}`", *(_cell(cls, name, str(number)) for number, cls in classes.items())]
        for name in dict.fromkeys(name for cls in classes.values() for name in written_by_phases(cls))
    ]
    head = ["method", *(f"phase {number}" for number in classes)]
    return f"By phase: {named}.\n\n{table(head, rows, 'l' + 'c' * len(classes))}"


def written_by_phases(cls: type) -> list[str]:
    """Return the names of methods and properties that `cls` and its base classes in phases define, base classes
    first."""
    owners = [owner for owner in reversed(cls.__mro__) if owner.__module__.startswith("phase")]
    found = [(name, value) for owner in owners for name, value in vars(owner).items()]
    return [
        name
        for name, value in found
        if (inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod))
        and (name == "__init__" or not name.startswith("__"))
    ]


def owner_of(cls: type, name: str) -> type | None:
    """Return the class that defines the method which runs for `cls`; None: there is none, or it is abstract."""
    owner = next((owner for owner in cls.__mro__ if name in vars(owner)), None)
    return None if owner is None or getattr(vars(owner)[name], "__isabstractmethod__", False) else owner


def _cell(cls: type, name: str, number: str) -> str:
    owner = owner_of(cls, name)
    if owner is None:
        return "–"
    package = owner.__module__.partition(".")[0]
    place = package.removeprefix("phase").partition("_")[0] if package.startswith("phase") else package
    link = _link(place, owner, "" if name.startswith("_") else f".{name}")
    return f"**{link}**" if place == number else link


def _link(text: str, cls: type, member: str = "") -> str:
    return f"[{text}][{cls.__module__}.{cls.__qualname__}{member}]"
