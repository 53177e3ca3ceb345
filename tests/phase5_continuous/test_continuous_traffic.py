"""Random traffic through phase 5: no slot is leaked or shared, every request ends exactly once."""

from __future__ import annotations

import pytest

from tests.traffic import assert_everything_happened, random_traffic, state_machine

TestContinuousTraffic = state_machine("continuous", examples=60, steps=50)


@pytest.mark.parametrize(("operations", "pass_tokens"), [(10_000, 8192), (2000, 20), (2000, 1)])
def test_10000_random_operations(operations: int, pass_tokens: int) -> None:
    traffic = random_traffic("continuous", operations, seed=1, max_prefill_pass_tokens=pass_tokens)
    assert_everything_happened(traffic)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_many_random_operations(seed: int) -> None:
    assert_everything_happened(random_traffic("continuous", 20_000, seed))
