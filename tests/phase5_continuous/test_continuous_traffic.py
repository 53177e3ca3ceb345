"""Random traffic through phase 5: no slot is leaked or shared, every request ends exactly once."""

from __future__ import annotations

import pytest

from tests.traffic import assert_everything_happened, random_traffic, state_machine

TestContinuousTraffic = state_machine("continuous", examples=60, steps=50)


@pytest.mark.parametrize("prefill", ["together", "one_by_one"])
def test_10000_random_operations(prefill: str) -> None:
    operations = 10_000 if prefill == "together" else 2000
    assert_everything_happened(random_traffic("continuous", operations, seed=1, prefill_newcomers=prefill))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_many_random_operations(seed: int) -> None:
    assert_everything_happened(random_traffic("continuous", 20_000, seed))
