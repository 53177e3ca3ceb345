"""Result files: JSON lines, a line for each run.

A run's own file (`Run.save`) has one line. `publish` collects complete comparisons in a compressed file for each
workload, such as `mixed.jsonl.xz`. There, each server keeps the requests and engine steps of one run, and the
latencies of all its runs. `load_comparisons` reads files of both kinds, also from one folder. A subfolder (`peers`,
or a machine's name) keeps results that pages must not mix with the others.
"""

from __future__ import annotations

import lzma
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.metrics import distribution
from benchmarks.report import columns_of, typical
from benchmarks.results import LOCAL, TABLES, Latencies, Run, is_complete, write_whole

PUBLISHED = ".jsonl.xz"

Key = tuple[str, str, str, bool]
Kept = Literal["typical", "all", "none"]


def latencies_of(runs: Iterable[Run]) -> Latencies:
    """Return the latencies of one server's complete runs: those in a published file, or those of the requests."""
    done = [run for run in runs if run.status == "ok"]
    for run in done:
        if run.latencies is not None:
            return run.latencies
    records = [record for run in done for record in run.requests if record.error is None]
    return Latencies(
        ttft=distribution([record.ttft_s for record in records]),
        itl=distribution([gap for record in records for gap in record.gaps_s]),
    )


@dataclass(frozen=True, slots=True)
class Together:
    """Runs that may be compared: runs of one workload and model that were measured together.

    Attributes:
        folder: the folder of their files, relative to the results folder: "" or, for example, "h200".
    """

    folder: str
    runs: list[Run]

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def key(self) -> Key:
        return _key(self.first)

    @property
    def local(self) -> bool:
        """True if these are the reader's own results."""
        return self.folder == LOCAL.name

    @property
    def labels(self) -> list[str]:
        return [repeats[0].server.label for repeats in columns_of(self.runs)]

    @property
    def latencies(self) -> dict[str, Latencies]:
        """Return the latencies of each server, by its label."""
        return {repeats[0].server.label: latencies_of(repeats) for repeats in columns_of(self.runs)}

    @property
    def repeats(self) -> int:
        return max(run.repeat for run in self.runs)

    @property
    def swept(self) -> set[str]:
        """Return the names of the options in which columns of one phase differ; empty for a plain comparison."""
        return {name for run in self.runs for name in run.server.variant}


def _key(run: Run) -> Key:
    return run.comparison, run.workload.name, run.server.model, run.workload.quick


def _by_comparison(runs: Iterable[Run]) -> dict[Key, list[Run]]:
    found: dict[Key, list[Run]] = defaultdict(list)
    for run in runs:
        found[_key(run)].append(run)
    return found


# ---------------------------------------------------------------------------------------------- reading


def load_runs(path: Path) -> Iterator[Run]:
    """Yield the runs of a file.

    Raises:
        ValueError: a line is not a run; the message names the file.
    """
    try:
        content = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        for line in content.splitlines():
            yield Run.model_validate_json(line)
    except (ValueError, lzma.LZMAError) as error:
        raise ValueError(f"{path} is not a file of runs: {error}") from None


def load_folder(folder: Path, name: str = "") -> list[Together]:
    """Return the comparisons in a folder. If a comparison was published there, its runs' own files count.

    Args:
        name: the comparisons' `folder`.
    """
    published, own = (
        _by_comparison(run for path in sorted(folder.glob(pattern)) for run in load_runs(path))
        for pattern in (f"*{PUBLISHED}", "*.json")
    )
    return [Together(name, runs) for runs in (published | own).values()]


def load_comparisons(results: Path) -> list[Together]:
    """Return the comparisons below a folder of results, oldest first.

    Raises:
        ValueError: a file holds something else than runs; the message names it.
    """
    paths = [*results.rglob("*.json"), *results.rglob(f"*{PUBLISHED}")]
    folders = sorted({path.parent for path in paths if path.parent.name != TABLES})
    found = []
    for folder in folders:
        name = "" if folder == results else folder.relative_to(results).as_posix()
        found += load_folder(folder, name)
    return sorted(found, key=lambda each: (*each.key, each.folder))


# ---------------------------------------------------------------------------------------------- publishing


def publish(
    source: Path, out: Path, *, timelines: Kept = "typical", only: Sequence[str] = ()
) -> list[Together]:
    """Write the complete comparisons of one folder into published files. Returns these comparisons.

    Comparisons that `out` has already stay there. If a new comparison has the same name, workload, model and
    size (quick or not) as an old comparison, it replaces the old one.

    Args:
        source: a folder with runs; folders below it are not looked at.
        out: the folder to publish in.
        timelines: the runs whose requests and engine steps are kept: "typical", for each server the run with the
            median throughput, which figures draw; "all"; or "none".
        only: names of comparisons; empty for all.
    """
    chosen = [
        each
        for each in load_folder(source)
        if is_complete(each.runs) and (not only or each.first.comparison in only)
    ]
    by_workload: dict[str, dict[Key, list[Run]]] = defaultdict(dict)
    for each in chosen:
        by_workload[each.first.workload.name][each.key] = list(_reduced(each, timelines))
    for workload, added in by_workload.items():
        path = out / f"{workload}{PUBLISHED}"
        kept = _by_comparison(load_runs(path) if path.is_file() else ()) | added
        lines = "".join(run.model_dump_json() + "\n" for key in sorted(kept) for run in kept[key])
        write_whole(path, lzma.compress(lines.encode(), preset=9))  # no time is stored: same runs, same bytes
    return chosen


def _reduced(each: Together, timelines: Kept) -> Iterator[Run]:
    """Yield the runs of a comparison as they are published."""
    for repeats in columns_of(each.runs):
        complete = [run for run in repeats if run.status == "ok"]
        shown = typical(complete) if complete else None
        for run in repeats:
            changes: dict[str, object] = {"latencies": latencies_of(repeats)} if run is shown else {}
            if timelines == "none" or (timelines == "typical" and run is not shown):
                changes |= {"requests": [], "engine_steps": None}
            yield run.model_copy(update=changes)
