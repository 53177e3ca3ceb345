"""Who overrides what: asked of the classes themselves when the site is built."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.kv import KVShape
from common.phases import find_phase, phase_names
from docs.building.folding import folded

ROOT = Path(__file__).resolve().parents[2]

ROLES = {"scheduler": "Scheduler", "runner": "Runner", "pool": "KV pool"}

#: What a step asks of a phase, in order (see `Engine.step`), and of whom.
STAGES = (
    ("runner", "wait"),
    ("runner", "settle"),
    ("scheduler", "retire"),
    ("runner", "release"),
    ("scheduler", "make_room"),
    ("scheduler", "admit"),
    ("scheduler", "plan"),
    ("runner", "execute"),
)
#: Whose method is meant where a body calls one of these names' attributes.
RECEIVERS = {"pool": "pool", "self.pool": "pool", "scheduler": "scheduler"}


@dataclass(frozen=True, slots=True)
class Body:
    """A method as a phase runs it.

    Attributes:
        owner: the class whose body it is.
        function: without its decorators.
    """

    name: str
    owner: type
    function: Callable[..., Any]

    @property
    def package(self) -> str:
        return self.owner.__module__.partition(".")[0]

    @property
    def place(self) -> str:
        """`7` for what phase 7 has written, `common` for what all phases share."""
        digits = self.package.removeprefix("phase").partition("_")[0]
        return digits if self.package.startswith("phase") else self.package

    @property
    def anchor(self) -> str:
        """The reference's entry: the method's, or its class's where it is private."""
        owner = f"{self.owner.__module__}.{self.owner.__qualname__}"
        return owner if self.name.startswith("_") else f"{owner}.{self.name}"


def classes_of(phase: str) -> dict[str, type]:
    """A phase's scheduler, runner and pool."""
    package = find_phase(phase)
    config = package.Config(max_seq_len=64)
    pool = package.build_engine.pool(config, KVShape(1, 1, 1, torch.float32), torch.device("cpu"))
    return {"scheduler": package.Scheduler, "runner": package.Runner, "pool": type(pool)}


def body_of(cls: type, name: str, above: type | None = None) -> Body | None:
    """Who answers when this class's method is called, or, for `super()`, the class above another one.

    None: nobody of this project has a body for it.
    """
    order = cls.__mro__
    for owner in order[order.index(above) + 1 :] if above else order:
        found = vars(owner).get(name)
        if found is None:
            continue
        function = inspect.unwrap(getattr(found, "fget", None) or getattr(found, "__func__", found))
        if not inspect.isfunction(function) or getattr(found, "__isabstractmethod__", False):
            return None
        return Body(name, owner, function)
    return None


def method_names(cls: type) -> list[str]:
    """Methods and properties of a class and of those above it, in the order in which they were first named."""
    owners = [owner for owner in reversed(cls.__mro__) if owner.__module__.startswith(("common", "phase"))]
    names = dict.fromkeys(name for owner in owners for name in vars(owner))
    return [name for name in names if body_of(cls, name) and (name == "__init__" or name[:2] != "__")]


def overrides_table(role: str) -> str:
    """Every method of one role that differs between phases: which phase's body runs, linked to it.

    What is the same for all is named below the table.
    """
    classes = {phase: classes_of(phase)[role] for phase in phase_names()}
    numbers = {phase: str(find_phase(phase).PHASE.number) for phase in classes}
    names = list(dict.fromkeys(name for cls in classes.values() for name in method_names(cls)))
    rows = [
        f"| method | {' | '.join(f'phase {number}' for number in numbers.values())} |",
        f"| --- |{' :---: |' * len(numbers)}",
    ]
    shared = []
    for name in names:
        bodies = {phase: body_of(cls, name) for phase, cls in classes.items()}
        if len({body and body.owner for body in bodies.values()}) == 1:
            shared.append(next(body for body in bodies.values() if body))
            continue
        cells = [_cell(body, numbers[phase]) for phase, body in bodies.items()]
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    alike = ", ".join(f"[`{body.name}`][{body.anchor}]" for body in shared)
    named = ", ".join(f"{numbers[phase]} {_class_link(cls)}" for phase, cls in classes.items())
    return f"By phase: {named}.\n\n" + "\n".join(rows) + f"\n\nOne body for all phases: {alike}.\n"


def _class_link(cls: type) -> str:
    return f"[`{cls.__name__}`][{cls.__module__}.{cls.__qualname__}]"


def _cell(body: Body | None, number: str) -> str:
    if body is None:
        return "–"
    link = f"[{body.place}][{body.anchor}]"
    return f"**{link}**" if body.place == number else link


def assembled_step(phase: str) -> str:
    """The step of a phase, put together: every body of a phase's that it runs, folded, where it is first called.

    What `common` has for all phases is followed and not shown: it is the same on every page.
    """
    classes = classes_of(phase)
    number = str(find_phase(phase).PHASE.number)
    shown: set[Body] = set()
    parts = []
    for role, name in STAGES:
        body = body_of(classes[role], name)
        assert body is not None, name
        parts.append(f"**`{role}.{name}`**\n")
        parts += [_folded(each, number) for each in _called(body, role, classes, shown)] or [
            f"Nothing that was not shown above, beside [what all phases share][{body.anchor}].\n"
        ]
    return '<div class="assembled" markdown>\n\n' + "\n".join(parts) + "\n</div>\n"


def _called(body: Body, role: str, classes: dict[str, type], shown: set[Body]) -> Iterator[Body]:
    """A body and those that it calls, as far as phases have written them, each once."""
    if body in shown:
        return
    shown.add(body)
    if body.place != "common":
        yield body
    for receiver, name in _calls(body.function):
        owner = RECEIVERS.get(receiver, role if receiver in ("self", "super()") else None)
        if owner is None:
            continue
        next_body = body_of(classes[owner], name, body.owner if receiver == "super()" else None)
        if next_body is not None:
            yield from _called(next_body, owner, classes, shown)


def _calls(function: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    """Attributes that a body asks for, in the order of its lines: of whom, and which."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    for node in sorted(found, key=lambda node: (node.lineno, node.col_offset, node.end_col_offset or 0)):
        yield ast.unparse(node.value), node.attr


def _folded(body: Body, number: str) -> str:
    lines, first = inspect.getsourcelines(body.function)
    path = Path(inspect.getsourcefile(body.function) or "").resolve().relative_to(ROOT)
    written = "this phase" if body.place == number else f"phase {body.place}"
    code = inspect.cleandoc("\n" + "".join(lines))
    title = f"{body.owner.__name__}.{body.name} · {written} · {path}, line {first}"
    return folded(title, f"```python\n{code}\n```", "quote")
