"""Tables of a comparison: medians over repeats, the best values marked.

`summary` fits 80 columns. It has a row for each server with the main metrics, and sentences that name the metrics
in which a server is better or worse than the server that it is compared with. `report` has every metric, a column
for each server, and the ratios. A phase is compared with the phase before, a variant with the first column of its
phase, and a peer with the last phase.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from benchmarks.results import Run

Value = float | None

FIRST_PEER = 100.0  # `ServerInfo.order` of a peer is at least this; of a phase it is less
LEAST_GUESSED = 0.02  # without guesses, a cancelled request's tokens may still look like a smaller share
ALIKE = 0.1  # values that differ by at most this share of the compared value count as equal
SUMMARY = ("output tokens / s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "longest stall")


@dataclass(frozen=True, slots=True)
class Line:
    """A metric, which is one line of the full table.

    Attributes:
        value: returns the metric of a run; None if the run does not have it.
        show: formats a value.
        better: "high" or "low", the direction that is better; "" if neither is.
    """

    title: str
    value: Callable[[Run], Value]
    show: Callable[[float], str]
    better: str = ""

    def is_worse(self, before: float, value: float) -> bool:
        """Return whether `value` is worse than `before`; False for a metric without a better direction."""
        return value < before if self.better == "high" else self.better == "low" and value > before


def _at(path: str) -> Callable[[Run], Value]:
    """Return a function that reads an attribute such as `metrics.ttft_s.p50`; None if part of the path is None."""

    def read(run: Run) -> Value:
        found: object = run
        for name in path.split("."):
            if found is None:
                return None
            found = getattr(found, name)
        return float(found) if isinstance(found, int | float) else None

    return read


def _arrival_rate(run: Run) -> Value:
    """Return the arrival rate, or None if the workload has no rate. A burst's rate would be the client's speed."""
    return None if run.workload.rate is None else _at("metrics.arrival_rate")(run)


def _of_cache(name: str) -> Callable[[Run], Value]:
    """Return a function that reads a metric of the prefix cache; None for a run without a hit."""
    return lambda run: _at(f"server_metrics.{name}")(run) if _at("server_metrics.cached_share")(run) else None


def _guessed_share(run: Run) -> Value:
    """Estimate the share of output tokens that were accepted guesses; None if it is at most `LEAST_GUESSED`.

    A request gets its first token from the pass that ends its prompt, and then one from each decode step. All other
    tokens are counted as guesses.
    """
    if run.metrics is None or run.server_metrics is None or not run.metrics.output_tokens:
        return None
    guessed = run.metrics.output_tokens - run.metrics.requests - run.server_metrics.decode_tokens
    share = guessed / run.metrics.output_tokens
    return share if share > LEAST_GUESSED else None


def format_seconds(seconds: float) -> str:
    """Format seconds; times below 0.9995 s are shown in milliseconds."""
    return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:.2f} s"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


_three_digits, _share = "{:.3g}".format, "{:.0%}".format

_LATENCIES = (("TTFT", "ttft_s"), ("ITL", "itl_s"), ("latency", "latency_s"))

LINES: Sequence[Line] = (
    Line("output tokens / s", _at("metrics.output_tokens_per_s"), _number, "high"),
    Line("requests / s", _at("metrics.requests_per_s"), _three_digits, "high"),
    *(
        Line(f"{title} {name}", _at(f"metrics.{kind}.{name}"), format_seconds, "low")
        for title, kind in _LATENCIES
        for name in ("p50", "p95", "p99", "max")
    ),
    Line("longest stall", _at("metrics.longest_stall_s"), format_seconds, "low"),
    Line("SLO attainment", _at("metrics.slo_attainment"), _share, "high"),
    Line("errors", _at("metrics.errors"), _number, "low"),
    Line("arrivals / s", _arrival_rate, _three_digits),
    Line("engine steps", _at("server_metrics.steps"), _number),
    Line("mean batch", _at("server_metrics.mean_batch"), "{:.2f}".format),
    Line("wasted work", _at("server_metrics.padded_share"), _share, "low"),
    Line("guessed tokens", _guessed_share, _share),
    Line("KV used, mean tokens", _at("server_metrics.kv_used_mean"), _number),
    Line("KV reserved, mean tokens", _at("server_metrics.kv_reserved_mean"), _number, "low"),
    Line("preemptions", _at("server_metrics.preemptions"), _number),
    Line("prompt tokens found in cache", _of_cache("cached_share"), _share, "high"),
    Line("evictions", _of_cache("evictions"), _number),
)


def median_of(runs: Iterable[Run], line: Line) -> Value:
    """Return the median over the repeats that have a value; None if none has."""
    values = [value for run in runs if (value := line.value(run)) is not None]
    return statistics.median(values) if values else None


def typical(runs: Sequence[Run]) -> Run:
    """Return the repeat with the median throughput; of two in the middle, the slower one.

    Figures of one run show this repeat, since timelines cannot be averaged.
    """
    ordered = sorted(runs, key=lambda run: run.metrics.output_tokens_per_s if run.metrics else 0.0)
    return ordered[(len(ordered) - 1) // 2]


def columns_of(runs: Sequence[Run]) -> list[list[Run]]:
    """Return a list of runs for each server, sorted by the servers' `order`."""
    labels = {run.server.label: run.server.order for run in runs}
    ordered = sorted(labels, key=lambda label: (labels[label], label))
    return [[run for run in runs if run.server.label == label] for label in ordered]


def repetition(runs: Sequence[Run]) -> str:
    """Return a note on each server's share of guessed tokens; "" if weights are not random or no server guessed."""
    guessed = next(line for line in LINES if line.title == "guessed tokens")
    columns = columns_of(runs)
    said = [
        f"{repeats[0].server.label} guessed {share:.0%} of its tokens"
        for repeats, share in zip(columns, medians_of(columns, guessed), strict=True)
        if share
    ]
    if not said or not runs[0].server.model.startswith("dummy:"):
        return ""
    return (
        f"With its random weights, this model's answers repeat themselves: {', '.join(said)}. "
        "Real text does so less."
    )


def best_of(values: Sequence[Value], better: str) -> Value:
    """Return the best value; None if no direction is better, fewer than two are known, or all are equal."""
    known = [value for value in values if value is not None]
    if not better or len(known) < 2 or min(known) == max(known):
        return None
    return max(known) if better == "high" else min(known)


def report(runs: Sequence[Run]) -> Group:
    """Return the table of a comparison with every metric, a title above and notes below.

    Runs that are not complete do not count in the medians. The notes name these runs.
    """
    table = Table()
    table.add_column("", no_wrap=True)
    columns = columns_of(runs)
    for repeats in columns:
        table.add_column(repeats[0].server.label, justify="right")
    for line in LINES:
        values = medians_of(columns, line)
        if any(value is not None for value in values):
            table.add_row(line.title, *cells_of(line, values, bases_of(columns)))
    ratios = "× the phase before (a variant: × its phase's first column; a peer: × the last phase)"
    return Group(_title(runs), table, _notes(runs, ratios))


def summary(runs: Sequence[Run], *, alike: float = ALIKE) -> Group:
    """Return the table of a comparison in 80 columns, a row for each server, and sentences that compare servers.

    Args:
        alike: values that differ by at most this share count as equal in sentences.
    """
    columns = columns_of(runs)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("")
    lines = [line for line in LINES if line.title in SUMMARY]
    medians = [medians_of(columns, line) for line in lines]
    shown = []
    for line, values in zip(lines, medians, strict=True):
        table.add_column(line.title.removeprefix("output "), justify="right", no_wrap=True)
        shown.append(_marked(line, values))
    for repeats, cells in zip(columns, zip(*shown, strict=True), strict=True):
        table.add_row(repeats[0].server.label, *cells)
    labels = [repeats[0].server.label for repeats in columns]
    sentences = []
    for index, base in enumerate(bases_of(columns)):
        if base is not None:
            compared = [(line, each[base], each[index]) for line, each in zip(lines, medians, strict=True)]
            sentences.append(_difference(labels[base], labels[index], compared, alike))
    terms = "* best · TTFT: until the first token · ITL: between two tokens · p99: 99 % below"
    return Group(_title(runs), table, *sentences, _notes(runs, terms))


def _marked(line: Line, values: Sequence[Value]) -> list[Text]:
    """Format the values of a metric. The best value is green with a star; the others end with a space instead."""
    best = best_of(values, line.better)
    cells = []
    for value in values:
        if value is None:
            cells.append(Text("– "))
        elif value == best:
            cells.append(Text(f"{line.show(value)}*", style="bold green"))
        else:
            cells.append(Text(f"{line.show(value)} "))
    return cells


def _difference(before: str, after: str, values: Sequence[tuple[Line, Value, Value]], alike: float) -> Text:
    """Return a sentence with the metrics in which server `after` is better or worse than server `before`, by more
    than `alike`. If one of them has no complete run, the sentence says so."""
    said = Text(f"{after} against {before}: ", style="bold")
    for label, column in ((before, 1), (after, 2)):
        if all(row[column] is None for row in values):
            return said.append(f"not compared, since {label} has no complete run.", style="not bold")
    better: list[str] = []
    worse: list[str] = []
    for line, old, new in values:
        if old is None or new is None or abs(new - old) <= alike * abs(old):
            continue
        change = f"{line.title} ({line.show(old)} → {line.show(new)})"
        (worse if line.is_worse(old, new) else better).append(change)
    if not (better or worse):
        return said.append(f"nothing differs by more than {alike:.0%}.", style="not bold")
    if better:
        said.append("better", style="green").append(f" in {', '.join(better)}", style="not bold")
    if worse:
        said.append("; " if better else "", style="not bold")
        said.append("worse", style="red").append(f" in {', '.join(worse)}", style="not bold")
    return said.append(".", style="not bold")


def _title(runs: Sequence[Run]) -> Text:
    workload, calibration = runs[0].workload, runs[0].calibration
    rate = f", {workload.rate:.3g} requests/s" if workload.rate is not None else ""
    factor = f" (table × {calibration.factor:.3g})" if workload.rate is not None and calibration else ""
    quick = " (quick)" if workload.quick else ""
    return Text(f"\n{workload.name}{quick}: {runs[0].server.model}{rate}{factor}", style="bold")


def medians_of(columns: Sequence[Sequence[Run]], line: Line) -> list[Value]:
    """Return the median of a metric for each server, over its complete runs. A column is a server's runs."""
    return [median_of((run for run in repeats if run.status == "ok"), line) for repeats in columns]


def cells_of(
    line: Line, values: Sequence[Value], bases: Sequence[int | None], strong: str = "[bold]{}[/bold]"
) -> list[str]:
    """Return a metric's cells for a row of a table: each value, and its ratio to the value it is compared with.

    Args:
        values: the metric's value for each column.
        bases: for each column the index of the column that it is compared with; None: no column.
        strong: the format of the best value.
    """
    best = best_of(values, line.better)
    cells = []
    for value, base in zip(values, bases, strict=True):
        if value is None:
            cells.append("–")
            continue
        text = line.show(value)
        if best is not None and value == best:
            text = strong.format(text)
        compared = values[base] if base is not None and line.better else None
        cells.append(f"{text}  ×{value / compared:.2f}" if compared else text)
    return cells


def bases_of(columns: Sequence[Sequence[Run]]) -> list[int | None]:
    """Return for each column the index of the column that it is compared with; None if there is no such column.

    A further column of a phase (a variant, or a learner's copy) is compared with the phase's first column. All
    others are compared with the first column of the last phase before them.
    """
    first_of: dict[int, int] = {}  # phase -> its first column
    bases: list[int | None] = []
    for index, repeats in enumerate(columns):
        phase = int(repeats[0].server.order)
        before = [column for number, column in first_of.items() if number < phase]
        bases.append(first_of.get(phase, max(before, default=None)))
        if phase < FIRST_PEER:
            first_of.setdefault(phase, index)
    return bases


def _notes(runs: Sequence[Run], *first: str) -> Text:
    repeats = max(run.repeat for run in runs)
    shares = [run.generator.cpu_share for run in runs if run.generator is not None]
    said = [
        f"median of {repeats} runs" if repeats > 1 else "one run",
        *first,
    ]
    if runs[0].workload.quick:
        said.append("a quick comparison: by chance, even two equal servers may differ by more than 10%")
    if shares:
        said.append(f"load generator: {max(shares):.0%} of a core at most")
    if about_guesses := repetition(runs):
        said.append(about_guesses)
    said += sorted({f"{run.server.label}: {note}" for run in runs for note in run.notes})
    said += [f"{run.server.label}, run {run.repeat} {run.status}: {run.reason}" for run in runs if run.reason]
    return Text("\n".join(said), style="dim")
