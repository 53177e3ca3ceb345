"""Copies a phase's package without the bodies of its main methods. Signatures and docstrings stay."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path

from common.errors import StartupError
from tutor.exercise import ROOT, Exercise

INDENT = " " * 8


def set_up(exercise: Exercise, tree: Path | None = None) -> dict[str, list[str]]:
    """Create the learner's tree. Returns the emptied methods of each file, as `Class.method`.

    Raises:
        StartupError: the tree exists already. A learner's work is never overwritten.
    """
    tree = exercise.tree if tree is None else tree
    if tree.exists():
        shown = tree.relative_to(ROOT) if tree.is_relative_to(ROOT) else tree
        raise StartupError(f"{shown} is there already, and stays as it is; move it away to begin anew")
    package = tree / exercise.package
    shutil.copytree(exercise.source, package, ignore=shutil.ignore_patterns("__pycache__"))
    taken: dict[str, list[str]] = {}
    for module in dict.fromkeys(name.partition(".")[0] for name in exercise.empty):
        names = [name.partition(".")[2] for name in exercise.empty if name.partition(".")[0] == module]
        path = package / f"{module}.py"
        text, methods = empty(path.read_text(encoding="utf-8"), f"{exercise.package}.{module}", names)
        path.write_text(text, encoding="utf-8")
        taken[f"{exercise.package}/{module}.py"] = methods
    return taken


def empty(text: str, module: str, names: Sequence[str]) -> tuple[str, list[str]]:
    """Return a module's source without the bodies of some methods, and the names of these methods.

    Args:
        text: the module's source.
        module: the module's name.
        names: `Class` for all its methods but `__init__`, or `Class.method`.

    Raises:
        ValueError: there is no such method, or it has no body of its own.
    """
    lines = text.splitlines()
    emptied: list[str] = []
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    for owner in reversed(classes):
        for method in reversed(owner.body):
            if not isinstance(method, ast.FunctionDef):
                continue
            name = f"{owner.name}.{method.name}"
            whole_class = owner.name in names and method.name != "__init__"
            if (whole_class or name in names) and _has_body(method):
                first = method.body[1] if ast.get_docstring(method) is not None else method.body[0]
                before = method.body[0].end_lineno if first is not method.body[0] else first.lineno - 1
                assert before is not None
                assert method.end_lineno is not None
                lines[before : method.end_lineno] = _owing(f"{name}: {owed_words(module, name)}")
                emptied.insert(0, name)
    missing = [
        name for name in names if not any(done == name or done.startswith(f"{name}.") for done in emptied)
    ]
    if missing:
        raise ValueError(f"{module} has no body to take out of {', '.join(missing)}")
    return "\n".join(lines) + "\n", emptied


def _has_body(method: ast.FunctionDef) -> bool:
    """Return whether a method has more than a docstring, on lines of its own."""
    last = method.body[-1]
    return last.lineno > method.lineno and not (
        isinstance(last, ast.Expr) and isinstance(last.value, ast.Constant)
    )


def _owing(words: str) -> list[str]:
    """Return the lines that replace a body: they raise an error that says what to write."""
    *parts, last = textwrap.wrap(words, 90)
    quoted = [json.dumps(part, ensure_ascii=False) for part in (*(f"{part} " for part in parts), last)]
    return [f"{INDENT}raise NotImplementedError(", *(f"{INDENT}    {part}" for part in quoted), f"{INDENT})"]


def owed_words(module: str, name: str) -> str:
    """Return a method's task: the first paragraph of its docstring, or of that of the method it overrides."""
    owner, _, method = name.partition(".")
    for each in getattr(importlib.import_module(module), owner).__mro__:
        doc = inspect.getdoc(vars(each)[method]) if method in vars(each) else None
        if doc:
            return " ".join(doc.split("\n\n")[0].split())
    return "look where it is called, and at the tests that call it"
