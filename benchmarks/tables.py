"""Tables that `benchmarks micro` and a few other programs measure, with their setup.

Each table is a file in a folder `tables` beside the runs of servers. Pages show tables by name.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.table import Table

from benchmarks.environment import describe_environment
from benchmarks.results import LOCAL, TABLES, write_whole

Cell = int | float | str | None


class MeasuredTable(BaseModel):
    """A table of measured numbers, with the conditions of its measurement.

    Attributes:
        name: the name of the table and of its file.
        title: what the rows are about.
        setup: the conditions of the measurement, by name.
        columns: headings, with units.
        rows: each has a cell for each column; None where nothing was measured.
        local: whether the table was read from the reader's own results; not stored in the file.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    title: str
    setup: dict[str, str] = Field(default_factory=dict)
    started_at: str = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    environment: dict[str, Any] = Field(default_factory=describe_environment)
    columns: list[str]
    rows: list[list[Cell]]
    local: bool = Field(default=False, exclude=True)

    def save(self, results: Path) -> Path:
        """Write the table's file below a folder of results and return its path."""
        return write_whole(results / TABLES / f"{self.name}.json", self.model_dump_json(indent=1) + "\n")

    def publish(self, results: Path, console: Console | None = None) -> None:
        """Print the table, write it below a folder of results, and print its path."""
        console = console or Console()
        self.print(console)
        console.print(f"written to {self.save(results)}")

    def print(self, console: Console) -> None:
        table = Table(*self.columns, title=self.title)
        for row in self.rows:
            table.add_row(*map(show, row))
        console.print(table)


def show(cell: Cell) -> str:
    """Format a cell. A float has up to three significant digits, and no decimals from 100 on. None is a dash."""
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:.3g}"
    return str(cell)


def newest_table(name: str, results: Path) -> MeasuredTable | None:
    """Return the newest table called `name` below a folder of results; None if there is none."""
    return next((table for table in load_tables(results) if table.name == name), None)


def load_tables(results: Path) -> list[MeasuredTable]:
    """Load every table below a folder of results, newest first.

    Raises:
        ValueError: a file is not a table; the message names it.
    """
    tables = []
    for path in sorted(results.rglob(f"{TABLES}/*.json")):
        try:
            table = MeasuredTable.model_validate_json(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path} is not a measured table: {error}") from None
        table.local = path.relative_to(results).parts[0] == LOCAL.name
        tables.append(table)
    return sorted(tables, key=lambda table: table.started_at, reverse=True)
