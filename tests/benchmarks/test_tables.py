"""Measured tables: saved whole, found again, and not mistaken for the runs beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.plots.groups import load_groups
from benchmarks.tables import MeasuredTable, load_tables
from tests.benchmarks.conftest import make_run


def a_table(name: str = "decode_step", started_at: str = "2026-01-02T03:04:05+00:00") -> MeasuredTable:
    return MeasuredTable(
        name=name,
        title="one step",
        setup={"batch": "8"},
        started_at=started_at,
        environment={"cpu": "A Processor", "cores": 2, "git": "0123456789ab", "packages": {"torch": "2.13"}},
        columns=["blocks", "ms", "note"],
        rows=[[16, 12.345, "same"], [8, None, ""]],
    )


def test_a_table_is_found_again_as_it_was(tmp_path: Path) -> None:
    table = a_table()
    path = table.save(tmp_path / "h200")
    assert path == tmp_path / "h200" / "tables" / "decode_step.json"
    assert load_tables(tmp_path) == [table]
    a_table("kv_cache", "2026-02-02T00:00:00+00:00").save(tmp_path)
    assert [each.name for each in load_tables(tmp_path)] == ["kv_cache", "decode_step"]


def test_a_file_that_is_no_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json"):
        load_tables(tmp_path)


def test_runs_and_tables_lie_side_by_side(tmp_path: Path) -> None:
    make_run().save(tmp_path)
    a_table().save(tmp_path)
    assert [group.name for group in load_groups(tmp_path)] == ["mixed-llama-tiny"]
    assert load_tables(tmp_path) == [a_table()]
