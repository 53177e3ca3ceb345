"""One command for all measurements: options from a function's signature, tables saved and shown."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import benchmarks.__main__ as command_line
from benchmarks import micro
from benchmarks.micro import ENTRIES, Dtype, in_turns, say
from benchmarks.results import LOCAL
from benchmarks.tables import MeasuredTable, load_tables


def counting(
    models: tuple[str, ...] = ("a", "b"), turns: int = 3, dtype: Dtype = "float32"
) -> Iterator[MeasuredTable]:
    """Count models.

    Args:
        turns: of each
    """
    table = MeasuredTable(name="counting", title="t", setup={"turns": f"{turns}"}, columns=["model"], rows=[])
    for model in models:
        table.rows.append([f"{model} in {dtype}"])
        say(f"{model} done")
        yield table
    yield MeasuredTable(name="second", title="t", setup={"threads": "7"}, columns=[], rows=[])


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro, "find", lambda name: counting)
    monkeypatch.setitem(ENTRIES, "counting", micro.Entry("counts", "nowhere.counting"))


@pytest.mark.usefixtures("entry")
def test_options_are_those_of_the_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--models", "x", "--models", "y", "z", "--turns", "5", "--dtype", "bfloat16"]
    assert command_line.main(["micro", "counting", *words, "--out", str(tmp_path)]) == 0
    counted, second = sorted(load_tables(tmp_path), key=lambda table: table.name)
    assert counted.rows == [["x in bfloat16"], ["y in bfloat16"], ["z in bfloat16"]]
    assert counted.setup["turns"] == "5"
    assert int(counted.setup["threads"]) > 0
    assert second.setup == {"threads": "7"}
    printed = capsys.readouterr().out
    assert "y done" in printed
    assert printed.count("x in bfloat16") == 1  # shown once, though it was saved three times


def test_ways_take_turns_and_the_first_turn_is_not_counted() -> None:
    asked: list[str] = []
    values = {"a": iter([9.0, 1.0, 5.0, 3.0]), "b": iter([9.0, 2.0, 2.0, 8.0])}

    def measure(way: str) -> float:
        asked.append(way)
        return next(values[way])

    found = in_turns({way: functools.partial(measure, way) for way in values}, turns=3)
    assert asked == ["a", "b"] * 4
    assert found == {"a": 3.0, "b": 2.0}


@pytest.mark.parametrize("name", ENTRIES)
def test_every_measurement_has_options_and_writes_to_the_readers_folder(name: str) -> None:
    options = micro.parser(name, micro.find(name)).parse_args([])
    assert options.out == LOCAL
