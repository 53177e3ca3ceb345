"""The random order that `--order-seed` draws."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

from tests.conftest import shuffled

TESTS = [SimpleNamespace(path=Path(module), number=number) for module in "abcd" for number in range(10)]


def test_an_order_has_every_test_once_and_its_seed_draws_it_again() -> None:
    order = shuffled(TESTS, 1)
    assert sorted(map(TESTS.index, order)) == list(range(len(TESTS)))
    assert order == shuffled(TESTS, 1)
    assert order != shuffled(TESTS, 2)


def test_modules_stay_whole_so_that_their_fixtures_are_made_once() -> None:
    modules = [
        [each.number for each in tests] for _, tests in groupby(shuffled(TESTS, 1), lambda each: each.path)
    ]
    assert len(modules) == 4
    assert all(numbers != sorted(numbers) for numbers in modules)
