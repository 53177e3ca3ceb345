"""Code on pages, copied from the source files when the site is built."""

from __future__ import annotations

import ast
import inspect
import pkgutil
from pathlib import Path

from docs.building.markdown import folded

ROOT = Path(__file__).resolve().parents[2]
EXERCISES = ROOT / "docs" / "exercises"
SOLUTION = "- one way to solve it\n"  # the heading of an exercise's last section


def source(name: str) -> str:
    """Return an object's source as a code block, titled with its file and line.

    Args:
        name: the full name, such as `common.kv.KVPool.view`. If there is no such object, the build fails.
    """
    found = pkgutil.resolve_name(_with_colon(name))
    target = inspect.unwrap(found.fget if isinstance(found, property) else found)
    lines, first = inspect.getsourcelines(target)
    path = Path(inspect.getsourcefile(target) or "").resolve().relative_to(ROOT)
    code = inspect.cleandoc("\n" + "".join(lines))
    return f'```python title="{path}, line {first}"\n{code}\n```\n'


def file(path: str) -> str:
    """Return a file of the project as a code block."""
    return f'```{Path(path).suffix[1:]} title="{path}"\n{(ROOT / path).read_text().strip()}\n```\n'


def solution(name: str) -> str:
    """Return the solution at the end of an exercise's file, as code in a box that is closed at first."""
    code = (EXERCISES / f"{name}.py").read_text(encoding="utf-8").partition(SOLUTION)[2].strip()
    assert code, f"{name} has no solution"
    return folded("One way to solve it", f"```python\n{code}\n```", "tip")


def exercise_command(name: str) -> str:
    """Return a sentence with the file to edit and the command that runs its tests, for one exercise."""
    path = f"docs/exercises/{name}.py"
    assert (ROOT / path).is_file(), path
    return (
        f"Edit the beginning of `{path}` (its end gives a solution away), then let its tests judge it:\n\n"
        f"```sh\n.venv/bin/pytest {path}\n```\n"
    )


def reference(*packages: str) -> str:
    """Return the lines by which mkdocstrings writes the reference of packages, for all their modules.

    Args:
        packages: names of packages. If a name ends in `.`, its subpackages are left out.
    """
    names = [name for package in packages for name in modules_of(package)]
    return "\n\n".join(f"::: {name}{_without_reexports(name)}" for name in names) + "\n"


def _without_reexports(name: str) -> str:
    """Return mkdocstrings options that leave out the classes which a phase's package only imports; "" for a module.
    The modules that define the classes list them."""
    if not (ROOT.joinpath(*name.split(".")) / "__init__.py").is_file():
        return ""
    return '\n    options:\n      filters: ["!^_", "!^(Config|Pool|Runner|Scheduler)$"]'


def modules_of(package: str) -> list[str]:
    """Return a package's modules without `__main__`, the package itself first if it holds more than a docstring."""
    alone = package.endswith(".")
    folder = ROOT.joinpath(*package.rstrip(".").split("."))
    found = []
    for path in sorted(folder.glob("*.py") if alone else folder.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[-1] == "__main__" or (parts[-1] == "__init__" and len(ast.parse(path.read_text()).body) < 2):
            continue
        found.append(".".join(part for part in parts if part != "__init__"))
    assert found, f"{package} has no modules"
    return found


def _with_colon(name: str) -> str:
    """Turn `package.module.Class.method` into `package.module:Class.method`, for `resolve_name`."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:cut])
        if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
            return ".".join(parts[:cut]) + ":" + ".".join(parts[cut:])
    raise ModuleNotFoundError(name)
