"""All attacks of `tests/faults/attackers.py` together, on a cluster of two."""

from __future__ import annotations

import pytest

from tests.faults.attackers import ATTACKS
from tests.faults.attacks import assert_ordinary_clients_are_served, serving

pytestmark = pytest.mark.cluster


@pytest.mark.timeout(900)
def test_ordinary_clients_are_served(phase: str) -> None:
    with serving(phase, replicas=2) as cluster:
        assert_ordinary_clients_are_served(cluster, list(ATTACKS))
