"""The short form of the soak: nothing is lost, on any phase, and what is lost would be seen."""

from __future__ import annotations

import pytest

from common.phases import phase_names
from tests.soak import program as soak
from tests.soak.program import State, Tally, row_of


@pytest.mark.slow
@pytest.mark.parametrize("phase", phase_names())
def test_nothing_is_lost(phase: str) -> None:
    tally, before, after, taken_s = soak.soak(phase, requests=400, clients=24)
    assert tally.wrong == []
    assert tally.ends.total() == 400
    assert {"answered", "cancelled", "refused"} == set(tally.ends)
    row = row_of(phase, tally, before, after, taken_s)
    assert row["wrong or missing"] == 0
    ended, _, added = str(row["ended on the server"]).partition(" of ")
    assert ended == added
    assert (row["held for nobody"], row["files"], row["threads"]) == (0, 0, 0)
    assert after.counters["requests_cancelled"] > before.counters["requests_cancelled"]


@pytest.mark.slow
def test_a_wrong_answer_a_lost_one_and_a_kind_refusal_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, told = soak.Clients._answer, []

    async def altered(self: soak.Clients, *args: object, **kwargs: object) -> str:
        told.append(1)
        if len(told) % 5 == 0:
            raise ConnectionError("lost")
        return await answer(self, *args, **kwargs) + "!"  # type: ignore[arg-type]

    monkeypatch.setattr(soak.Clients, "_answer", altered)
    monkeypatch.setattr(soak, "malformed", lambda draw: {"model": soak.MODEL, "prompt": "x", "max_tokens": 1})
    tally, *_ = soak.soak("9", requests=120, clients=8)
    assert any("lost" in each for each in tally.wrong)
    assert any("alone" in each for each in tally.wrong)
    assert any("200" in each for each in tally.wrong)


def test_what_is_held_for_nobody_adds_up() -> None:
    names = (
        "requests_added",
        "requests_finished",
        "requests_failed",
        "requests_cancelled",
        "reclaimed_slots",
    )
    counters = dict.fromkeys(names, 0.0)
    before = State(counters, queue_room=9, reserved_tokens=0, files=5, threads=3, memory_bytes=1000)
    after = State(
        counters | {"requests_added": 4, "requests_finished": 3, "requests_failed": 1, "reclaimed_slots": 2},
        queue_room=8,
        reserved_tokens=16,
        files=6,
        threads=3,
        memory_bytes=1010,
    )
    tally = Tally(health_s=[i / 1000 for i in range(101)])
    row = row_of("4", tally, before, after, 1.0)
    assert row["held for nobody"] == 2 + 16 + 1
    assert row["ended on the server"] == "4 of 4"
    assert (row["wrong or missing"], row["files"], row["threads"]) == (1, 1, 0)
    assert row["memory, %"] == pytest.approx(1)
    assert (row["/health p50, ms"], row["p99, ms"]) == (pytest.approx(50), pytest.approx(99))
