"""Random traffic through phase 4: no row is leaked or shared, every request ends exactly once."""

from __future__ import annotations

import pytest

from tests.traffic import assert_everything_happened, random_traffic, state_machine

TestStaticTraffic = state_machine("static", examples=40, steps=40)


def test_4000_random_operations() -> None:
    assert_everything_happened(random_traffic("static", 4000, seed=1))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_many_random_operations(seed: int) -> None:
    assert_everything_happened(random_traffic("static", 10_000, seed))
