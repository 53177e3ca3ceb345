"""Result files: one for each run, as `compare` writes them, and published files, which are smaller and fewer.

A run's own file (`Run.save`) holds everything that was measured. `publish` reduces these files to two a workload:

- `mixed.published.json`: every run's metrics, options, versions and machine, and a distribution of each server's
  latencies.
- `mixed.timelines.json.xz`: requests and engine steps of some runs, for the figures that show them and for the
  simulator's replay.

A published file holds all comparisons of its workload that were published in its folder. `load_comparisons` reads
files of both kinds, also from one folder. A subfolder (`peers`, or a machine's name) keeps results that pages must
not mix with the others.
"""

from __future__ import annotations

import itertools
import json
import lzma
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from benchmarks.metrics import distribution
from benchmarks.report import columns_of, typical
from benchmarks.results import (
    DIGITS,
    LOCAL,
    TABLES,
    Distribution,
    RequestRecord,
    Run,
    is_complete,
    write_whole,
)

PUBLISHED, TIMELINES = ".published.json", ".timelines.json.xz"

Key = tuple[str, str, str, bool]
Kept = Literal["typical", "all", "none"]
Packed = dict[str, Any]
_COMPARISONS = TypeAdapter(list[Packed])


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of one server's complete runs, all repeats together."""

    ttft: Distribution
    itl: Distribution

    @classmethod
    def of(cls, runs: Iterable[Run]) -> Latencies:
        done = [record for run in runs for record in run.requests if record.error is None]
        return cls(
            ttft=distribution([record.ttft_s for record in done]),
            itl=distribution([gap for record in done for gap in record.gaps_s]),
        )


@dataclass(frozen=True, slots=True)
class Together:
    """Runs that may be compared: runs of one workload and model that were measured together.

    Attributes:
        folder: the folder of their files, relative to the results folder: "" or, for example, "h200".
        latencies: each server's latencies, by its label. Only published runs have them here, because most published
            runs keep no requests.
    """

    folder: str
    runs: list[Run]
    latencies: dict[str, Latencies] = field(default_factory=dict)

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def key(self) -> Key:
        return (
            self.first.comparison,
            self.first.workload.name,
            self.first.server.model,
            self.first.workload.quick,
        )

    @property
    def local(self) -> bool:
        """True if these are the reader's own results."""
        return self.folder == LOCAL.name

    @property
    def labels(self) -> list[str]:
        return [repeats[0].server.label for repeats in columns_of(self.runs)]

    @property
    def repeats(self) -> int:
        return max(run.repeat for run in self.runs)

    @property
    def swept(self) -> set[str]:
        """Return the names of the options in which columns of one phase differ; empty for a plain comparison."""
        return {name for run in self.runs for name in run.server.variant}


# ---------------------------------------------------------------------------------------------- reading


def run_folders(results: Path) -> list[Path]:
    """Return the folders with JSON files, `results` and below, without the folders of measured tables."""
    return sorted({path.parent for path in results.rglob("*.json")} - set(results.rglob(TABLES)))


def load_runs(folder: Path) -> list[Run]:
    """Return every run that has a file of its own in a folder, in the order of their files' names.

    Raises:
        ValueError: a file is not a run; the message names it.
    """
    runs = []
    for path in sorted(folder.glob("*.json")):
        if path.name.endswith(PUBLISHED):
            continue
        try:
            runs.append(Run.model_validate_json(path.read_bytes()))
        except ValueError as error:
            raise ValueError(f"{path} is not a run's result: {error}") from None
    return runs


def load_comparisons(results: Path) -> list[Together]:
    """Return the comparisons below a folder of results, oldest first.

    Raises:
        ValueError: a file is neither a run nor a file of published runs; the message names it.
    """
    found = [each for folder in run_folders(results) for each in _comparisons_in(folder, results)]
    return sorted(found, key=lambda each: (*each.key, each.folder))


def _comparisons_in(folder: Path, results: Path) -> list[Together]:
    name = "" if folder == results else folder.relative_to(results).as_posix()
    found: dict[Key, Together] = {}
    for path in sorted(folder.glob(f"*{PUBLISHED}")):
        found |= {each.key: each for each in _read(path, name)}
    own: dict[Key, list[Run]] = defaultdict(list)
    for run in load_runs(folder):
        own[Together(name, [run]).key].append(run)
    found |= {key: Together(name, runs) for key, runs in own.items()}
    return list(found.values())


def _read(path: Path, folder: str) -> list[Together]:
    beside = _beside(path)
    try:
        comparisons = _COMPARISONS.validate_json(path.read_bytes())
        timelines = json.loads(lzma.decompress(beside.read_bytes())) if beside.is_file() else {}
        return [_unpacked(packed, timelines, folder) for packed in comparisons]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(f"{path} is not a file of published runs: {error}") from None


def _beside(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(PUBLISHED) + TIMELINES)


# ---------------------------------------------------------------------------------------------- publishing


def publish(
    source: Path, out: Path, *, timelines: Kept = "typical", only: Sequence[str] = ()
) -> list[Together]:
    """Write the complete comparisons of one folder as published files. Returns these comparisons, not reduced.

    Comparisons that `out` has already stay there. If a new comparison has the same name, workload, model and
    size (quick or not) as an old comparison, it replaces the old one.

    Args:
        source: a folder with runs; folders below it are not looked at.
        out: the folder to publish in.
        timelines: the runs whose timelines are kept: "typical", for each server the run with the median
            throughput, which figures draw; "all"; or "none".
        only: names of comparisons; empty for all.
    """
    chosen = [
        each
        for each in _comparisons_in(source, source)
        if is_complete(each.runs) and (not only or each.first.comparison in only)
    ]
    by_workload: dict[str, list[Together]] = defaultdict(list)
    for each in chosen:
        by_workload[each.first.workload.name].append(each)
    for workload, added in by_workload.items():
        path = out / f"{workload}{PUBLISHED}"
        kept = {each.key: each for each in (_read(path, "") if path.is_file() else [])}
        kept |= {each.key: _reduced(each, timelines) for each in added}
        _write(path, [kept[key] for key in sorted(kept)])
    return chosen


def _reduced(each: Together, timelines: Kept) -> Together:
    columns = {
        repeats[0].server.label: complete
        for repeats in columns_of(each.runs)
        if (complete := [run for run in repeats if run.status == "ok"])
    }
    shown = {
        "typical": [typical(repeats) for repeats in columns.values()],
        "all": each.runs,
        "none": [],
    }[timelines]
    return Together(
        each.folder,
        [run if run in shown else _without_timeline(run) for run in each.runs],
        {label: each.latencies.get(label) or Latencies.of(repeats) for label, repeats in columns.items()},
    )


def _without_timeline(run: Run) -> Run:
    return run.model_copy(update={"requests": [], "engine_steps": None})


def _write(path: Path, comparisons: Sequence[Together]) -> None:
    packed = ",\n".join(_text(_packed(each)) for each in comparisons)
    write_whole(path, f"[\n{packed}\n]\n")
    timelines = {
        run.file_name: {"requests": _columns(run.requests), "engine_steps": _steps(run.engine_steps)}
        for each in comparisons
        for run in each.runs
        if run.requests
    }
    if timelines:
        # The format stores no time of writing, so the same runs give the same bytes.
        write_whole(_beside(path), lzma.compress(_text(timelines).encode(), preset=9))
    else:
        _beside(path).unlink(missing_ok=True)


def _text(content: Packed) -> str:
    return json.dumps(content, separators=(",", ":"))


# ---------------------------------------------------------------------------------------------- packing


def _packed(each: Together) -> Packed:
    """Return a comparison as its file stores it: fields that are equal in all runs are stored once."""
    rows = [run.model_dump(mode="json", exclude={"requests", "engine_steps"}) for run in each.runs]
    shared = {name: value for name, value in rows[0].items() if all(row[name] == value for row in rows)}
    return {
        "shared": shared,
        "runs": [{name: value for name, value in row.items() if name not in shared} for row in rows],
        "latencies": {
            label: {"ttft": found.ttft.model_dump(), "itl": found.itl.model_dump()}
            for label, found in each.latencies.items()
        },
    }


def _unpacked(packed: Packed, timelines: Packed, folder: str) -> Together:
    runs = [Run.model_validate(packed["shared"] | row) for row in packed["runs"]]
    for run in runs:
        if timeline := timelines.get(run.file_name):
            run.requests = _records(timeline["requests"])
            run.engine_steps = _from_ticks_of(timeline["engine_steps"])
    latencies = {
        label: Latencies(**{kind: Distribution.model_validate(value) for kind, value in found.items()})
        for label, found in packed["latencies"].items()
    }
    return Together(folder, runs, latencies)


TICKS = 10**DIGITS  # in a second: files store times as whole numbers of ticks


def _columns(requests: Sequence[RequestRecord]) -> Packed:
    """Return the requests as one list for each field. Times are in ticks. A token's time is stored as the
    difference from the time of the token before."""
    found: Packed = {}
    for name in RequestRecord.model_fields:
        values = [getattr(record, name) for record in requests]
        if name == "token_times_s":
            values = [_differences(times) for times in values]
        elif name.endswith("_s"):
            values = [None if value is None else round(value * TICKS) for value in values]
        found[name] = values
    return found


def _records(columns: Packed) -> list[RequestRecord]:
    rows = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
    return [RequestRecord(**{name: _value(name, value) for name, value in row.items()}) for row in rows]


def _value(name: str, value: Any) -> Any:
    if name == "token_times_s":
        return _sums(value)
    return value / TICKS if name.endswith("_s") and value is not None else value


def _steps(steps: dict[str, list[int | float]] | None) -> Packed | None:
    if steps is None:
        return None
    return {name: _differences(values) if name.endswith("_s") else values for name, values in steps.items()}


def _from_ticks_of(steps: Packed | None) -> Packed | None:
    if steps is None:
        return None
    return {name: _sums(values) if name.endswith("_s") else values for name, values in steps.items()}


def _differences(seconds: Sequence[float]) -> list[int]:
    ticks = [round(value * TICKS) for value in seconds]
    return [later - earlier for earlier, later in itertools.pairwise([0, *ticks])]


def _sums(differences: Sequence[int]) -> list[float]:
    return [ticks / TICKS for ticks in itertools.accumulate(differences)]
