"""Measured tables: saved whole, found again, and not mistaken for the runs beside them."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.plots.groups import load_groups
from benchmarks.tables import MeasuredTable, load_tables, show
from docs.building import charts, ledger
from docs.building import results as pages
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


def test_a_table_of_the_readers_own_says_so(tmp_path: Path) -> None:
    a_table().save(tmp_path)
    own = a_table("decode_step", "2026-02-02T00:00:00+00:00").save(tmp_path / "local")
    assert "local" not in own.read_text()
    assert [table.local for table in load_tables(tmp_path)] == [True, False]
    newest, older = pages.measured_table("decode_step", tmp_path).split("A Processor, 2 cores")[1:]
    assert newest.startswith(", measured in this checkout")
    assert "measured in this checkout" not in older


def test_a_file_that_is_no_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json"):
        load_tables(tmp_path)


def test_runs_and_tables_lie_side_by_side(tmp_path: Path) -> None:
    make_run().save(tmp_path)
    a_table().save(tmp_path)
    assert [group.name for group in load_groups(tmp_path)] == ["mixed-llama-tiny"]
    shown = ledger.ledger(tmp_path)
    assert "1 runs in 1 comparisons" in shown
    assert "2026-01-02: decode_step" in shown
    a_table("decode_step", "2026-03-03T00:00:00+00:00").save(tmp_path / "h200")
    page = pages.measured_table("decode_step", tmp_path)
    assert page.index("2026-03-03") < page.index("2026-01-02")  # for each machine, the newest first
    assert "python -m benchmarks micro kv_cache" in pages.measured_table("kv_cache", tmp_path)


def test_comparisons_with_other_servers_have_tables_of_their_own(tmp_path: Path) -> None:
    assert "No comparison" in pages.peers_tables(tmp_path / "empty")
    make_run("phase 6").save(tmp_path)
    make_run("phase 7", 7).save(tmp_path)
    assert "No comparison" in pages.peers_tables(tmp_path)
    pages.groups.cache_clear()
    for comparison, workload, quick in (
        ("20260102-000000", "mixed", False),
        ("20260103-000000", "single", False),
        ("20260104-000000", "burst", True),  # too few requests to quote
    ):
        for label, order in (("phase 7", 7), ("vLLM 0.1", 102)):
            run = make_run(label, order, workload=workload, comparison=comparison, quick=quick)
            run.save(tmp_path / "peers")
    shown = pages.peers_tables(tmp_path)
    assert shown.count("| phase 7 | vLLM 0.1 |") == 2
    assert '"mixed: phase 7, vLLM 0.1"' in shown
    assert "burst" not in shown
    assert "phase 6" not in shown


def test_a_page_shows_setup_and_rows(tmp_path: Path) -> None:
    a_table().save(tmp_path)
    text = pages.measured_table("decode_step", tmp_path)
    assert "A Processor, 2 cores" in text
    assert "batch 8" in text
    assert "revision `0123456789ab`" in text
    assert "| 16 | 12.3 | same |" in text
    assert "| 8 | – |  |" in text
    printed = io.StringIO()
    a_table().print(Console(file=printed, width=100))
    assert "12.3" in printed.getvalue()


def test_a_chart_has_a_curve_for_each_value_of_a_column(tmp_path: Path) -> None:
    rows: list[list[Any]] = [[1, "random", 9.0], [4, "random", None], [1, "least_loaded", 5.0]]
    rows += [[4, "least_loaded", 7.0]]
    table = MeasuredTable(name="t", title="t", columns=["replicas", "policy", "TTFT, s"], rows=rows)
    table.save(tmp_path)
    drawn = charts.line_chart("t", "replicas", "TTFT, s", by="policy", title="", y_title="", results=tmp_path)
    assert re.findall(r">(random|least loaded)<", drawn) == ["random", "least loaded"]
    assert [path.count("L") for path in re.findall(r'class="line \w+" d="(.+?)"', drawn)] == [0, 1]


def test_numbers_are_shown_with_three_digits() -> None:
    assert [show(cell) for cell in (1234.5, 0.12345, 7, None, "x")] == ["1,234", "0.123", "7", "–", "x"]
