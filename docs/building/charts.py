"""Small charts of measured tables. They are part of the page's HTML, so that they have the page's colours."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tables import MeasuredTable, load_tables, show
from docs.building.pictures import Bar, bars, figure, text
from docs.building.results import RESULTS

NOT_MEASURED = "(not measured yet)"  # in place of a cell whose table is missing
WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 128, 26, 40
TICKS = [digit * 10.0**power for power in range(-6, 9) for digit in (1, 2, 5)]
WEIGHT_BYTES = {"bfloat16": 2, "float32": 4}
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
    results: Path = RESULTS,
) -> str:
    """Return a line chart of columns of a measured table over another column; "" if the table was not measured.

    Args:
        name: the table's name.
        x: heading of the column on the horizontal axis.
        columns: headings of the columns that are drawn as curves.
        only: draw only rows whose first cell is this; all rows if empty.
        by: heading of a column; each of its values gets a curve of its own.
        linear: whether axes are linear and begin at 0; otherwise both axes are logarithmic.
    """
    table = newest(name, results)
    if table is None:
        return ""
    place = {heading: index for index, heading in enumerate(table.columns)}
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row, column in itertools.product(table.rows, columns):
        if only in ("", row[0]) and row[place[column]] is not None:
            curve = str(row[place[by]]).replace("_", " ") if by else column
            found[curve].append((_number(row[place[x]]), _number(row[place[column]])))
    curves = [Curve(name, points) for name, points in found.items()]
    return draw(curves, title=title, x_title=x, y_title=y_title, linear=linear)


def bar_chart(name: str, column: str, *, title: str, labels: float = 130, results: Path = RESULTS) -> str:
    """Return a chart with a bar for each row of a measured table; "" if the table was not measured.

    Args:
        name: the table's name.
        column: heading of the column with the bars' values. Rows without a value are left out. The table's first
            column has the labels.
        labels: width of the labels, in pixels.
    """
    table = newest(name, results)
    if table is None:
        return ""
    place = list(table.columns).index(column)
    shown = [
        Bar(str(row[0]), _number(row[place]), show(row[place]))
        for row in table.rows
        if row[place] is not None
    ]
    return bars(shown, title, title, labels=labels)


def newest(name: str, results: Path = RESULTS) -> MeasuredTable | None:
    """Return the newest published table called `name`. If there is none, return the reader's own newest table of
    this name, or None."""
    found = [table for table in load_tables(results) if table.name == name]
    return min(found, key=lambda table: table.local, default=None)


def measured_cell(name: str, column: str, *row: str | float, results: Path = RESULTS) -> str:
    """Return one cell of a measured table for a sentence, from the first row that begins with the cells `row`."""
    table = newest(name, results)
    if table is None:
        return NOT_MEASURED
    place = table.columns.index(column)
    return next(show(cells[place]) for cells in table.rows if tuple(cells[: len(row)]) == row)


def measured_ratio(
    name: str,
    column: str,
    before: Sequence[str | float],
    after: Sequence[str | float],
    results: Path = RESULTS,
) -> str:
    """Return a cell of a measured table divided by another cell of the column, for a sentence: `×1.24`.

    Args:
        before: the first cells of the divisor's row.
        after: as many first cells of the dividend's row.
    """
    table = newest(name, results)
    if table is None:
        return NOT_MEASURED
    place = table.columns.index(column)
    cells = {tuple(row[: len(before)]): row[place] for row in table.rows}
    old, new = cells.get(tuple(before)), cells.get(tuple(after))
    return NOT_MEASURED if old is None or new is None else f"×{_number(new) / _number(old):.2f}"


def measured_slope(name: str, column: str, results: Path = RESULTS) -> str:
    """Return how much a column of a measured table grows for each unit of the first column, for a sentence.

    The growth is the mean from the table's first row to its last row.
    """
    table = newest(name, results)
    if table is None:
        return NOT_MEASURED
    place = table.columns.index(column)
    (low, *_), (high, *_) = table.rows[0], table.rows[-1]
    grown = _number(table.rows[-1][place]) - _number(table.rows[0][place])
    return show(grown / (_number(high) - _number(low)))


def rows_at_crossing(results: Path = RESULTS) -> str:
    """Return how many rows a pass must have so that multiplying with a weight takes as long as reading it."""
    table = newest("batch_size", results)
    if table is None:
        return NOT_MEASURED
    giga_bytes, giga_operations = (
        float(table.setup[key].split()[0].replace(",", "")) for key in ("reads", "multiplies")
    )
    weight_bytes = WEIGHT_BYTES[table.setup["model"].rpartition(" in ")[2]]
    return f"{giga_operations / giga_bytes * weight_bytes / 2:.0f}"


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
