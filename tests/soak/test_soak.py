"""A short run of the soak: no request is lost on any phase, and a lost one would be noticed."""

from __future__ import annotations

import pytest

from common.startup.phases import phase_names
from tests.soak import program as soak
from tests.soak.program import row_of


@pytest.mark.slow
@pytest.mark.parametrize("phase", phase_names())
def test_nothing_is_lost(phase: str) -> None:
    tally, before, after, taken_s = soak.soak(phase, requests=200, clients=24)
    assert tally.wrong == []
    assert tally.ends.total() == 200
    assert {"answered", "cancelled", "refused"} == set(tally.ends)
    row = row_of(phase, tally, before, after, taken_s)
    assert row["wrong or missing"] == 0
    ended, _, added = str(row["ended on the server"]).partition(" of ")
    assert ended == added
    assert (row["held for nobody"], row["files"], row["threads"]) == (0, 0, 0)
    assert after.counters["requests_cancelled"] > before.counters["requests_cancelled"]
