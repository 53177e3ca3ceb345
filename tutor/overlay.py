"""Runs a module of the project with a learner's files in place of the project's own.

`learn/phase5/phase5_continuous/scheduler.py` replaces the module `phase5_continuous.scheduler`. A module that the
learner's folder does not have is the project's.

```sh
python -m tutor.overlay learn/phase5 tutor.serving phase5_continuous --port 8000
```

Nothing is imported from the project here, because a module that is imported already cannot be replaced.
"""

from __future__ import annotations

import functools
import linecache
import logging
import os
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

ErrorWatcher = Callable[[BaseException], None]


class Place(NamedTuple):
    """A line of a file, where an error was raised or a call is executing."""

    file: str
    line: int
    function: str  # "" for a syntax error
    code: str

    @property
    def file_and_line(self) -> str:
        path = os.path.relpath(self.file)
        return f"{self.file if path.startswith('..') else path}:{self.line}"

    def __str__(self) -> str:
        return self.file_and_line + (f", in {self.function}" if self.function else "")


class ReturnedNoneError(TypeError):
    """A function of the learner's returned None, which its annotation does not allow: often a `return` is missing.

    Attributes:
        place: the line that defines the function.
    """

    def __init__(self, function: FunctionType) -> None:
        super().__init__(f"{function.__qualname__} returned None, not {function.__annotations__['return']}")
        code = function.__code__
        text = linecache.getline(code.co_filename, code.co_firstlineno).strip()
        self.place = Place(code.co_filename, code.co_firstlineno, function.__name__, text)


def check_results(module: ModuleType) -> None:
    """Let a module's functions and methods raise `ReturnedNoneError` if they return None against their annotation.

    Functions that the module imports, and those without an annotation, stay as they are.
    """
    for owner in (module, *(each for each in vars(module).values() if isinstance(each, type))):
        for name, value in list(vars(owner).items()):
            if isinstance(value, FunctionType) and _forbids_none(value, module):
                setattr(owner, name, _checked(value))


def _forbids_none(function: FunctionType, module: ModuleType) -> bool:
    returned = function.__annotations__.get("return", "None")
    own = function.__code__.co_filename == module.__file__
    return own and not re.search(r"\b(None|Optional|Any|object|NoReturn|Never)\b", str(returned))


def _checked(function: FunctionType) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        if result is None:
            raise ReturnedNoneError(function)
        return result

    return call


class CheckingLoader(SourceFileLoader):
    """Loads a learner's module, whose functions then check what they return (`check_results`)."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        check_results(module)


class Overlay(MetaPathFinder):
    """Finds modules below a learner's folder. It comes before Python's own finders."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the project's folder
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        *parents, _ = name.split(".")
        found = PathFinder.find_spec(name, [str(self.tree.joinpath(*parents))], target)
        if found is None or not found.has_location:
            return None  # without a location, it is a folder: then the package is the project's
        if type(found.loader) is SourceFileLoader:
            found.loader = CheckingLoader(found.loader.name, found.loader.path)
        return found


def install(tree: Path, watch: ErrorWatcher | None = None) -> None:
    """Import modules below `tree` in place of the project's from now on, and log the lines in `tree` that fail.

    If a logged error passed through files below `tree`, the last line there that it passed replaces its traceback
    in the log.

    Args:
        tree: the learner's folder.
        watch: called with each of these errors.
    """
    sys.meta_path.insert(0, Overlay(tree))
    make = logging.getLogRecordFactory()

    def pointing(*arguments: Any, **named: Any) -> logging.LogRecord:
        record = make(*arguments, **named)
        raised = record.exc_info[1] if record.exc_info else None
        logged = record.args if isinstance(record.args, tuple) else ()
        error = raised or next((each for each in logged if isinstance(each, BaseException)), None)
        if error is not None and (place := place_in(tree, error)):
            if watch is not None:
                watch(error)
            record.msg = f"{record.getMessage()}\n  {place}: {in_words(error)}\n    {place.code}"
            record.args, record.exc_info = (), None
        return record

    logging.setLogRecordFactory(pointing)


def place_in(folder: Path, error: BaseException) -> Place | None:
    """Return the last line, in files below `folder`, that an error passed through.

    For a syntax error, it is the line of the error; for `ReturnedNoneError`, the function's first line.

    If there is none, returns the line of the error's cause, and so on. Returns None if no cause has such a line.
    """
    if isinstance(error, ReturnedNoneError) and _is_below(folder, error.place.file):
        return error.place
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_relative_to(folder):
        return Place(error.filename, error.lineno or 0, "", (error.text or "").strip())
    frames = [each for each in traceback.extract_tb(error.__traceback__) if _is_below(folder, each.filename)]
    if frames:
        last = frames[-1]
        return Place(last.filename, last.lineno or 0, last.name, last.line or "")
    return place_in(folder, error.__cause__) if error.__cause__ else None


def _is_below(folder: Path, file: str) -> bool:
    return Path(file).is_relative_to(folder)


def in_words(error: BaseException) -> str:
    """Return an error's type and the first line of its message."""
    message = error.msg if isinstance(error, SyntaxError) else str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def main(arguments: Sequence[str]) -> int:
    """Run a module with a learner's files: `tree module arguments …`.

    Returns 1 after an error that passed through one of the learner's files. Other errors are raised.
    """
    tree, module, *rest = arguments
    install(Path(tree).resolve())
    sys.argv = [module, *rest]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception as error:
        place = place_in(Path(tree).resolve(), error)
        if place is None:
            raise
        print(f"error: {place}: {in_words(error)}\n    {place.code}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
