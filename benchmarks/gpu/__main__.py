"""Runs the stages of the GPU run. Each program runs in a process of its own, which is killed at its time limit.

```text
OUT/environment.json   the machine, and packages that are missing
OUT/stage-2.json       how each program of the stage ended; written when the stage ends
OUT/logs/2-NAME.log    its output
OUT/tables/*.json      its tables, which grow while it runs
OUT/summary.txt        the table that is printed at the end, over all stages in OUT
```
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.claims import claims
from benchmarks.gpu.environment import ROOT
from benchmarks.gpu.stages import INTERPRETED, STAGE_S, Program, Stage, stages

BUDGET_S = 45 * 60.0
LAST_LINES = 3
TERM_S = 10.0  # after SIGTERM, until a program must have stopped its servers

Result = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0 if every program has succeeded, 1 if one has not, 2 if nothing can run."""
    command = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0])
    command.add_argument("--out", type=Path, required=True, help="folder for results")
    command.add_argument("--stage", type=int, choices=stages(toy=True), help="run this stage alone")
    command.add_argument(
        "--budget", type=float, default=BUDGET_S, help=f"seconds for all stages ({BUDGET_S:g})"
    )
    options = command.parse_args(arguments)
    deadline_s = time.monotonic() + options.budget
    out = options.out.resolve()
    (out / "logs").mkdir(parents=True, exist_ok=True)
    environment = examine(out)
    if environment is None:
        return 2
    table = stages(toy=environment["gpu"] is None)
    chosen = {options.stage: table[options.stage]} if options.stage else table
    succeeded = True
    for number, stage in chosen.items():
        results = list(run_stage(number, stage, out, deadline_s, interpreted=environment["gpu"] is None))
        (out / f"stage-{number}.json").write_text(
            json.dumps({"title": stage.title, "programs": results}, indent=1)
        )
        succeeded &= all(result["ended"] == "ok" for result in results)
    summary = "\n".join(summarise(out, environment))
    (out / "summary.txt").write_text(summary + "\n")
    print(f"\n{summary}", flush=True)
    return 0 if succeeded else 1


def examine(out: Path) -> Result | None:
    """Print a description of the machine and its packages, and write it to environment.json.

    Returns:
        The content of environment.json; None if `benchmarks.gpu.environment` failed.
    """
    asked = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.environment"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode:
        print(f"this machine cannot be examined:\n{asked.stderr}", flush=True)
        return None
    (out / "environment.json").write_text(asked.stdout)
    found: Result = json.loads(asked.stdout)
    gpu = found["gpu"]
    print(f"GPU: {gpu['name'] if gpu else 'none: toy sizes, in the interpreter of Triton'}")
    print(", ".join(f"{name} {version}" for name, version in found["versions"].items()))
    if missing := found["missing"]:
        print(f"MISSING, and what needs them will fail: {', '.join(missing)}")
        names = " ".join(shlex.quote(each) for each in missing)
        print(
            f"elsewhere: pip install --no-deps --target .gpu-packages {names}; here: PYTHONPATH=.gpu-packages"
        )
    sys.stdout.flush()
    return found


def run_stage(
    number: int, stage: Stage, out: Path, deadline_s: float, *, interpreted: bool
) -> Iterator[Result]:
    """Run a stage's programs. Each is killed at its own limit, the stage's or the budget's, whichever comes first.

    Yields:
        For each program: its name, how it ended, its seconds and the last lines of its log.
    """
    print(f"\nstage {number}: {stage.title}", flush=True)
    stage_ends_s = min(time.monotonic() + STAGE_S, deadline_s)
    for program in stage.programs:
        limit_s = min(program.seconds, stage_ends_s - time.monotonic())
        result: Result = {"name": program.name, "ended": "no time left", "seconds": 0.0, "last": ""}
        if limit_s > 0:
            result |= run(number, program, out, limit_s, interpreted=interpreted and program.interpreted)
        print(f"  {program.name}: {result['ended']} after {result['seconds']:.0f} s", flush=True)
        if result["ended"] != "ok":
            print(f"    {result['last']}", flush=True)
        yield result


def run(number: int, program: Program, out: Path, limit_s: float, *, interpreted: bool) -> Result:
    """Run a program in a process group of its own, and kill the group at the limit.

    Returns:
        How the program ended (`ok`, an exit code, or killed), its seconds and the last lines of its log.
    """
    log = out / "logs" / f"{number}-{program.name}.log"
    words = [word.format(out=out) for word in shlex.split(program.words)]
    began_s = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env=os.environ | {"COLUMNS": "150"} | (INTERPRETED if interpreted else {}),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
            ended = "ok" if code == 0 else f"exit {code}"
        except subprocess.TimeoutExpired:
            ended = f"killed at {limit_s:.0f} s"
        finally:
            end_group(process)
    lines = log.read_text(errors="replace").split("\n")
    last = " | ".join([line.strip() for line in lines if line.strip()][-LAST_LINES:])
    return {"ended": ended, "seconds": round(time.monotonic() - began_s, 1), "last": last}


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End all processes of a process group. They get SIGTERM first, so that programs can stop their servers, and
    then SIGKILL."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(TERM_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def summarise(out: Path, environment: Result) -> Iterator[str]:
    """Yield the lines of the summary: each program of all stages whose results are in `out`, then each claim."""
    gpu = environment["gpu"]
    yield f"on {gpu['name']}" if gpu else "on a CPU, at toy sizes: no figure here says anything about a GPU"
    for path in sorted(out.glob("stage-*.json")):
        stage = json.loads(path.read_text())
        for result in stage["programs"]:
            name, ended, seconds = result["name"], result["ended"], result["seconds"]
            yield f"{path.stem:<8} {stage['title']:<25} {name:<28} {ended:<16} {seconds:>6.0f} s"
    for claim, verdict in claims(out):
        yield f"{claim:<72} {verdict}"


if __name__ == "__main__":
    sys.exit(main())
