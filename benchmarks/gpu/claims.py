"""Judges each claim about GPUs by the GPU run's results. Verdicts begin with "held", "NOT HELD" or "no result"."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.stages import MODELS

ROOFLINE_SHARE, ROOFLINE_BATCH = 0.7, 8
TRANSFORMERS_RATIO = 2.0
CAPTURED, PIPELINED = "9 captured", "9 pipelined"

Row = Mapping[str, Any]


def claims(out: Path) -> Iterator[tuple[str, str]]:
    """Yield each claim and its verdict, from the files in a folder of results."""
    tests = _log(out / "logs" / "1-tests.log")
    yield "kernels, graphs, streams and phases pass their tests", _passed(tests, "")
    yield "bits are the same alone and beside others", _passed(tests, "test_bits")
    for model in MODELS:
        steps = rows(out, f"gpu_steps_{model}")
        name = f"{model}: {ROOFLINE_SHARE:.0%} of the roofline, 1 to {ROOFLINE_BATCH} rows, captured"
        shares = [
            row["share of the roofline"]
            for row in steps
            if row["way"] == CAPTURED and row["sequences"] <= ROOFLINE_BATCH
        ]
        yield name, _at_least(shares, ROOFLINE_SHARE, "{:.0%}")
        ours = {row["sequences"]: row["tokens / s"] for row in steps if row["way"] == PIPELINED}
        theirs = {row["sequences"]: row["tokens / s"] for row in rows(out, f"gpu_transformers_{model}")}
        ratios = [ours[count] / theirs[count] for count in ours.keys() & theirs.keys()]
        name = f"{model}: {TRANSFORMERS_RATIO:g} × the continuous batching of transformers"
        yield name, _at_least(ratios, TRANSFORMERS_RATIO, "{:.1f} ×")


def rows(out: Path, table: str) -> list[Row]:
    """Return the rows of a measured table, each as a mapping from heading to cell; [] if it was not measured."""
    path = out / "tables" / f"{table}.json"
    if not path.exists():
        return []
    content = json.loads(path.read_text())
    return [dict(zip(content["columns"], row, strict=True)) for row in content["rows"]]


def _log(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _passed(log: str, name: str) -> str:
    """Return the verdict over the tests whose names contain `name`, from pytest's log."""
    # pytest writes the verdict after the test's name, or before it if xdist runs several processes.
    ended = re.findall(rf"^\S+::\S*{name}\S* (PASSED|FAILED|ERROR)", log, re.MULTILINE)
    ended += re.findall(rf"^\[gw\d+\] .*(PASSED|FAILED|ERROR) \S+::\S*{name}", log, re.MULTILINE)
    failed = len(ended) - ended.count("PASSED")
    broken = len(re.findall(r"^ERROR \S+\.py( |$)", log, re.MULTILINE)) if not name else 0
    if not ended and not broken:
        return "no result"
    counts = f"{ended.count('PASSED')} passed, {failed} failed, {broken} modules not read"
    return f"{'NOT HELD' if failed or broken else 'held'}: {counts}"


def _at_least(values: Sequence[float], goal: float, form: str) -> str:
    if not values:
        return "no result"
    least = min(values)
    return f"{'held' if least >= goal else 'NOT HELD'}: at the least {form.format(least)}"
