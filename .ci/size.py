"""Prints how large each part of the project is, and how many functions a decode step calls.

Fails if a part is larger than its ceiling in `size.toml`. `make size` runs it. Counts the files that git tracks, as
they are in the working tree.
"""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

RESULTS = "benchmarks/results/"


def tracked() -> list[Path]:
    """Return the paths, from the root, of all files that git tracks and that exist."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def lines_of(path: Path) -> int:
    return (ROOT / path).read_text().count("\n")


def functions(path: Path) -> Iterator[tuple[int, str]]:
    """Yield every function of a file as its number of lines and `path:name`."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.end_lineno - node.lineno + 1, f"{path}:{node.name}"


def crossed(package: str) -> tuple[int, int]:
    """Return the number of functions that one decode step of four sequences calls, and the number of their modules.

    Only functions of `common` (without `common.models`) and of the phases are counted. The counted step is the
    eleventh, so it makes no calls that only the first steps make.

    Args:
        package: the phase's package, such as `phase5_continuous`.
    """
    from common.request import SamplingParams
    from common.startup.phases import find_phase

    phase = find_phase(package)
    engine = phase.build_engine(phase.Config(model="zoo:llama-tiny", max_seq_len=128, max_batch_size=4))
    params = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
    for _ in range(4):
        engine.add_request(engine.maker.create("Once upon a time", params))
    for _ in range(10):
        engine.step()
    called: set[tuple[str, str]] = set()

    def trace(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename.removeprefix(f"{ROOT}/")
        if (
            event == "call"
            and file.startswith(("common/", "phase"))
            and not file.startswith("common/models/")
        ):
            called.add((file, frame.f_code.co_qualname))

    sys.setprofile(trace)
    engine.step()
    sys.setprofile(None)
    return len(called), len({file for file, _ in called})


def is_in(path: Path, part: dict[str, Any]) -> bool:
    """Return whether a file of Python counts to a part of `size.toml`."""
    name = str(path)
    return name.startswith(tuple(part["paths"])) and not name.startswith(tuple(part.get("without", ())))


def main() -> int:
    """Print the sizes. Returns 1 if a part is above a ceiling, or else 0."""
    files = tracked()
    parts = tomllib.loads((ROOT / ".ci/size.toml").read_text())["part"]
    above = []
    print(f"{'part':<36}{'lines':>8}{'ceiling':>9}{'modules':>9}{'median':>8}{'largest':>9}")
    for part in parts:
        lines = [lines_of(path) for path in files if path.suffix == ".py" and is_in(path, part)]
        total, middle = sum(lines), round(statistics.median(lines))
        row = f"{part['name']:<36}{total:>8,}{part['lines']:>9,}{len(lines):>9}{middle:>8}{max(lines):>9}"
        print(row)
        if total > part["lines"] or len(lines) > part.get("modules", len(lines)):
            above.append(part["name"])
    results = [ROOT / path for path in files if str(path).startswith(RESULTS)]
    megabytes = sum(path.stat().st_size for path in results) / 1e6
    print(f"{'result files':<36}{len(results):>8}, {megabytes:.1f} MB")
    everything = sum((ROOT / path).stat().st_size for path in files) / 1e6
    print(f"{'all tracked files':<36}{len(files):>8}, {everything:.1f} MB")
    own_code = [path for path in files if path.suffix == ".py" and path.parts[0] != "tests"]
    length, name = max(each for path in own_code for each in functions(path))
    print(f"longest function outside of tests: {length} lines, {name}")
    sys.path.insert(0, str(ROOT))
    for package in ("phase5_continuous", "phase9_pipelined"):
        count, modules = crossed(package)
        print(f"a decode step of {package} crosses {count} functions in {modules} modules")
    if above:
        print(f"above the ceiling in .ci/size.toml: {', '.join(above)}")
    return bool(above)


if __name__ == "__main__":
    sys.exit(main())
