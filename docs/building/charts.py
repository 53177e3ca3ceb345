"""Small charts of measured tables. They are part of the page's HTML, so that they have the page's colours."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from docs.building.pictures import figure, text
from docs.building.tables import newest_table

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 128, 26, 40
TICKS = [digit * 10.0**power for power in range(-6, 9) for digit in (1, 2, 5)]
KINDS = ("decode", "prefill", "idle", "sample")  # CSS classes of curves: a colour and a shape of marks each


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a chart. `points` are (x, y) in the units of the data."""

    name: str
    points: Sequence[tuple[float, float]]


def line_chart(
    name: str,
    x: str,
    *columns: str,
    title: str,
    y_title: str,
    only: str = "",
    by: str = "",
    linear: bool = False,
) -> str:
    """Return a line chart of columns of the newest measured table of a name, over another of its columns.

    Args:
        name: the table's name.
        x: heading of the column on the horizontal axis.
        columns: headings of the columns that are drawn as curves.
        only: draw only rows whose first cell is this; all rows if empty.
        by: heading of a column; each of its values gets a curve of its own.
        linear: whether axes are linear and begin at 0; otherwise both axes are logarithmic.
    """
    table = newest_table(name)
    place = {heading: index for index, heading in enumerate(table.columns)}
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row, column in itertools.product(table.rows, columns):
        if only in ("", row[0]) and row[place[column]] is not None:
            curve = str(row[place[by]]).replace("_", " ") if by else column
            found[curve].append((_number(row[place[x]]), _number(row[place[column]])))
    curves = [Curve(name, points) for name, points in found.items()]
    return draw(curves, title=title, x_title=x, y_title=y_title, linear=linear)


def draw(curves: Sequence[Curve], *, title: str, x_title: str, y_title: str, linear: bool = False) -> str:
    """Draw at most four curves on two logarithmic axes, or on two linear axes that begin at 0."""
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    ticks = _linear_ticks(max(ys)) if linear else _logarithmic_ticks(min(ys), max(ys))
    x_range, y_range = (0 if linear else min(xs), max(xs)), (ticks[0], ticks[-1])

    def share(value: float, low: float, high: float) -> float:
        if linear:
            return (value - low) / (high - low)
        return math.log(value / low) / (math.log(high / low) or 1)

    def at(x: float, y: float) -> tuple[float, float]:
        across, up = share(x, *x_range), share(y, *y_range)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    shapes = []
    free_below = math.inf
    for x in sorted(dict.fromkeys(xs), reverse=linear):  # where labels would overlap, the larger number stays
        left, bottom = at(x, y_range[0])
        if not linear or left < free_below:
            shapes.append(text(left, bottom + 14, f"{x:g}", "step"))
            free_below = left - 20
    for y in ticks:
        left, height = at(x_range[0], y)
        shapes.append(f'<path class="grid" d="M{left:.1f} {height:.1f}H{WIDTH - RIGHT}"/>')
        shapes.append(text(left - 18, height + 4, f"{y:g}", "step"))
    shapes.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_title, "step"))
    shapes.append(text(0, 10, y_title, "label"))
    ends: list[float] = []
    for kind, curve in zip(KINDS, curves, strict=False):
        points = [at(x, y) for x, y in sorted(curve.points)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        shapes.append(f'<path class="line {kind}" d="M{path}"/>')
        shapes += [_mark(x, y, kind) for x, y in points]
        label = _free(points[-1][1] + 4, ends)
        ends.append(label)
        shapes.append(text(points[-1][0] + 10, label, curve.name.rpartition(", ")[0] or curve.name, "label"))
    return figure(WIDTH, HEIGHT, shapes, title, "")


def ratio_chart(name: str, *columns: str, title: str) -> str:
    """Return a bar for each row of the newest measured table of a name, and for each of these columns of ratios.

    Bars begin at 1, where what is compared is alike, on a logarithmic axis. A row's first cell names it.
    """
    table = newest_table(name)
    ratios = [[_number(row[table.columns.index(column)]) for column in columns] for row in table.rows]
    ends = [1.0, *itertools.chain.from_iterable(ratios)]
    ticks = _logarithmic_ticks(min(ends), max(ends))
    left, right, bar = 190, WIDTH - 40, 16

    def across(ratio: float) -> float:
        return left + (right - left) * math.log(ratio / ticks[0]) / math.log(ticks[-1] / ticks[0])

    bars, top = [], 4
    for row, values in zip(table.rows, ratios, strict=True):
        bars.append(text(0, top + bar * len(values) / 2 + 4, str(row[0]), "label"))
        for kind, value in zip(KINDS, values, strict=False):
            begin, end = sorted((across(1), across(value)))
            size = f'width="{end - begin:.1f}" height="{bar - 2}"'
            bars.append(f'<rect class="{kind}" x="{begin:.1f}" y="{top}" {size}/>')
            bars.append(text(end + 16, top + bar - 5, f"{value:.2g}", "step"))
            top += bar
        top += bar // 2
    grid = [f'<path class="grid" d="M{across(tick):.1f} 0V{top}"/>' for tick in ticks]
    grid += [text(across(tick), top + 14, f"{tick:g}", "step") for tick in ticks]
    keys = [f'<span class="key {kind}">{column}</span>' for kind, column in zip(KINDS, columns, strict=False)]
    return figure(WIDTH, top + 20, grid + bars, title, "".join(keys))


def _logarithmic_ticks(least: float, most: float) -> list[float]:
    low = max(tick for tick in TICKS if tick <= least)
    high = min(tick for tick in TICKS if tick >= most and tick > low)
    return [tick for tick in TICKS if low <= tick <= high]


def _linear_ticks(most: float) -> list[float]:
    unit = 10.0 ** math.floor(math.log10(most))
    return [unit * count for count in range(math.ceil(most / unit) + 1)]


def _mark(x: float, y: float, kind: str) -> str:
    """Return the mark of a point. Its shape depends on the kind of the line."""
    match kind:
        case "decode":
            return f'<circle class="mark {kind}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
        case "prefill":
            return f'<rect class="mark {kind}" x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6"/>'
        case _:
            return f'<path class="mark {kind}" d="M{x - 4:.1f} {y + 3:.1f}l4 -7l4 7z"/>'


def _free(y: float, taken: Sequence[float]) -> float:
    """Return a height for a label, at `y` or below it, that overlaps no label in `taken`."""
    for other in sorted(taken):
        if abs(y - other) < 13:
            y = other + 13
    return y


def _number(cell: object) -> float:
    assert isinstance(cell, int | float), cell
    return float(cell)
