"""Draws the table of `simulator.plan`: throughput, TTFT and the router's limit by number of replicas and policy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.plots.style import BLUE, DASHES, GREEN, GREY, ORANGE, VERMILION, Theme
from benchmarks.tables import MeasuredTable

NAME, KIND = "simulator_replicas", "replicas"
WIDTH = 8.0  # inches

#: Colour and dashes of each policy, from the policy that uses most information to the one that uses none.
LOOKS = dict(
    zip(
        ("prefix", "least_loaded", "round_robin", "random"),
        zip((BLUE, GREEN, ORANGE, VERMILION), DASHES, strict=True),
        strict=True,
    )
)

Points = dict[str, tuple[list[float], list[float]]]


def draw_replicas(table: MeasuredTable, _theme: Theme) -> Figure:
    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    throughput, ttft, router = figure.subplots(1, 3)
    shares = {
        policy: (xs, [y / x for x, y in zip(xs, ys, strict=True)])
        for policy, (xs, ys) in series(table, "output tokens/s").items()
    }
    _lines(throughput, shares, "output tokens/s a replica")
    _lines(ttft, series(table, "TTFT p99, s"), "TTFT p99, s")
    _lines(router, series(table, "decisions/s"), "requests/s through one router")
    sent, rates = zip(*_sent(table), strict=True)
    router.plot(sent, rates, color=GREY, linestyle=":", marker="", label="sent to all replicas")
    for axes in (throughput, ttft, router):
        axes.set_xscale("log")
        axes.set_xlabel("replicas")
    throughput.set_ylim(bottom=0)
    ttft.set_yscale("log")
    router.set_yscale("log")
    handles, labels = router.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    return figure


def _lines(axes: Axes, points: Points, title: str) -> None:
    for policy, (xs, ys) in points.items():
        colour, dashes = LOOKS[policy]
        axes.plot(
            xs,
            ys,
            color=colour,
            linestyle=dashes,
            marker="o",
            markersize=3,
            label=policy.replace("_", " "),
        )
    axes.set_title(title)


def series(table: MeasuredTable, column: str) -> Points:
    """Return for each policy the numbers of replicas at which the column has a value, and the values."""
    found: Points = defaultdict(lambda: ([], []))
    replicas, policy, value = (table.columns.index(name) for name in ("replicas", "policy", column))
    for row in table.rows:
        if isinstance(row[value], int | float):
            xs, ys = found[str(row[policy])]
            xs.append(_number(row, replicas))
            ys.append(_number(row, value))
    return dict(found)


def _sent(table: MeasuredTable) -> list[tuple[float, float]]:
    replicas, sent = (table.columns.index(name) for name in ("replicas", "requests/s sent"))
    return sorted({(_number(row, replicas), _number(row, sent)) for row in table.rows})


def _number(row: Sequence[int | float | str | None], place: int) -> float:
    value = row[place]
    assert isinstance(value, int | float)
    return float(value)


CAPTION = (
    "Left and middle in virtual time, with a router that decides at once; right, how many decisions a second one "
    "router's policy makes in real time. Where a policy's line meets the dotted one, it is the router that limits."
)
