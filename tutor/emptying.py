"""Copies the modules of an exercise without the bodies to write. Signatures and docstrings stay."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.errors import StartupError
from tutor.exercise import ROOT, Exercise, shown


def set_up(exercise: Exercise, tree: Path | None = None) -> None:
    """Create the learner's copy in `tree`, by default `exercise.tree`: the modules without the bodies to write.

    Raises:
        StartupError: the folder exists already. A learner's work is never overwritten.
    """
    tree = exercise.tree if tree is None else tree
    if tree.exists():
        raise StartupError(f"{shown(tree)} is there already, and stays as it is; move it away to begin anew")
    for file, names in exercise.empty.items():
        module = file.removesuffix(".py").replace("/", ".")
        text = empty((ROOT / file).read_text(encoding="utf-8"), module, names)
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        (tree / file).write_text(text, encoding="utf-8")


def empty(text: str, module: str, names: Sequence[str]) -> str:
    """Return a module's source without the bodies of some functions.

    A statement that raises NotImplementedError with the function's task replaces each body.

    Args:
        text: the module's source.
        module: the module's name.
        names: `function` or `Class.method`.

    Raises:
        ValueError: there is no such function.
    """
    lines = text.splitlines()
    found = dict(_functions(ast.parse(text)))
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"{module} has no {', '.join(missing)}")
    # From the end, so that earlier lines keep their numbers.
    for name in sorted(names, key=lambda name: -found[name].lineno):
        function = found[name]
        doc = ast.get_docstring(function)
        first = function.body[0]
        start = first.end_lineno if doc is not None else first.lineno - 1
        words = f"{name}: {owed_words(module, name, doc)}"
        lines[start : function.end_lineno] = _owing(words, " " * first.col_offset)
    return "\n".join(lines) + "\n"


def _functions(node: ast.AST, owner: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions of a module and the methods of its classes, each after its name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield owner + child.name, child
        elif isinstance(child, ast.ClassDef | ast.If):  # `if HAS_TRITON:` holds functions of the module
            yield from _functions(child, f"{child.name}." if isinstance(child, ast.ClassDef) else owner)


def _owing(words: str, indent: str) -> list[str]:
    """Return the source lines that replace a function's body: they raise an error that says what to write."""
    *parts, last = textwrap.wrap(words, 90)
    quoted = [json.dumps(part, ensure_ascii=False) for part in (*(f"{part} " for part in parts), last)]
    return [f"{indent}raise NotImplementedError(", *(f"{indent}    {part}" for part in quoted), f"{indent})"]


def owed_words(module: str, name: str, doc: str | None) -> str:
    """Return a function's task: the first paragraph of its docstring.

    A method without a docstring has the task of the method that it overrides.
    """
    owner, _, method = name.rpartition(".")
    classes = getattr(importlib.import_module(module), owner).__mro__ if owner and not doc else ()
    docs = (inspect.getdoc(vars(each)[method]) for each in classes if method in vars(each))
    doc = doc or next(filter(None, docs), None)
    assert doc is not None, f"no docstring says what {module}.{name} does"
    return " ".join(doc.split("\n\n")[0].split())
