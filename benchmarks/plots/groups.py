"""Groups of runs that one figure compares, and values that several figures derive from them."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.files import Together, latencies_of, load_comparisons
from benchmarks.plots.style import DASHES, GREY, HATCHES, PHASE_COLOURS
from benchmarks.report import FIRST_PEER, Line, Value, columns_of, median_of, typical
from benchmarks.results import Latencies, RequestRecord, Run, is_complete, slug


@dataclass(frozen=True, slots=True)
class Server:
    """One server's complete runs of one workload, and the look of the server in figures.

    Attributes:
        runs: the complete runs, one per repeat.
        latencies: the latencies of all these runs together.
        colour, dash, hatch: how figures draw the server. A phase looks the same in every figure.
    """

    label: str
    runs: Sequence[Run]
    latencies: Latencies
    colour: str
    dash: str
    hatch: str

    @property
    def typical(self) -> Run:
        return typical(self.runs)

    def median(self, line: Line) -> Value:
        return median_of(self.runs, line)

    def spread(self, line: Line) -> tuple[float, float]:
        """Return the smallest and the largest value over repeats."""
        values = [value for run in self.runs if (value := line.value(run)) is not None]
        return min(values), max(values)


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that one figure compares: one workload, model and machine, measured together."""

    name: str
    local: bool  # the reader's own results
    servers: Sequence[Server]

    @property
    def first(self) -> Run:
        return self.servers[0].runs[0]

    @property
    def requests(self) -> Sequence[RequestRecord]:
        """Return the requests of the first server's first run that has kept its requests; [] if no run has.

        All runs were sent the same requests.
        """
        return next((run.requests for run in self.servers[0].runs if run.requests), [])

    @property
    def title(self) -> str:
        run = self.first
        machine = run.environment.get("gpu") or run.environment.get("cpu") or "unknown machine"
        quick = " (quick)" if run.workload.quick else ""
        here = " · measured in this checkout" if self.local else ""
        return f"{run.workload.name}{quick} · {run.server.model} · {machine}{here}"


def load_groups(results: Path) -> list[Group]:
    """Return the groups below a folder of results, in the order of their names.

    Runs of different comparisons are not mixed: their rates were scaled by different calibrations. If a workload
    was measured several times on a model, the complete comparison with the most servers is drawn (of several, the
    latest), and each other one that has a server which no comparison drawn so far has. A subfolder of results
    (`h200`, `peers`) makes groups of its own. Sweeps over a phase's options are tables of the site, not figures.
    """
    found: dict[str, list[Together]] = defaultdict(list)
    for each in load_comparisons(results):
        measured = [run for run in each.runs if run.status == "ok"]
        if measured and is_complete(each.runs) and not each.swept:
            quick = "-quick" if each.first.workload.quick else ""
            parts = (
                *Path(each.folder).parts,
                each.first.workload.name,
                f"{slug(each.first.server.model)}{quick}",
            )
            found["-".join(parts)].append(dataclasses.replace(each, runs=measured))
    groups = []
    for name, comparisons in sorted(found.items()):
        shown: set[str] = set()
        for each in sorted(comparisons, key=lambda each: (len(each.labels), each.key), reverse=True):
            if not shown.issuperset(each.labels):
                own_name = f"{name}-{each.first.comparison}" if shown else name
                groups.append(Group(own_name, each.local, _servers(each)))
                shown.update(each.labels)
    return groups


def _servers(together: Together) -> list[Server]:
    servers = []
    peers = 0
    for repeats in columns_of(together.runs):
        info = repeats[0].server
        if info.order < FIRST_PEER:
            look = PHASE_COLOURS.get(int(info.order), GREY), "-", ""
        else:
            peers += 1
            look = GREY, DASHES[peers % len(DASHES)], HATCHES[peers % len(HATCHES)]
        servers.append(Server(info.label, repeats, latencies_of(repeats), *look))
    return servers


# ---------------------------------------------------------------------------------------------- derived


def watched_client(group: Group) -> int:
    """Return the index of the request whose waits are drawn, the same request for every server.

    Of the second quarter of the requests, in the order in which they were due, it is the request with the largest
    `max_tokens`. It finds the server busy, and other requests arrive while it is answered. The first requests find
    an empty server, so they hardly wait for their first token.
    """
    ordered = sorted(group.requests, key=lambda record: record.scheduled_s)
    count = len(ordered)
    quarter = ordered[count // 4 : max(count // 2, count // 4 + 1)]
    return max(quarter, key=lambda record: (record.max_tokens, -record.index)).index


def thin(
    times: Sequence[float], values: Sequence[float], limit: int = 400
) -> tuple[list[float], list[float]]:
    """Reduce a curve to at most `limit` points. The curve is cut into pieces with equally many points (the last may
    have fewer). The highest point of each piece is kept, so that peaks stay."""
    stride = max(1, -(-len(times) // limit))
    stretches = [range(start, min(start + stride, len(times))) for start in range(0, len(times), stride)]
    highest = [max(stretch, key=values.__getitem__) for stretch in stretches]
    return [times[place] for place in highest], [values[place] for place in highest]
