"""The path of a token: every leg is timed once, and the legs add up to the whole path."""

from __future__ import annotations

import pytest

from benchmarks.micro import token_path
from benchmarks.micro.token_path import LEGS, Marks, legs_ms, measure
from common.startup.phases import find_phase

REQUESTS, TOKENS = 3, 2


def passed() -> Marks:
    """Return marks at which every leg takes a second. The first leg of a later token begins with its step."""
    marks = Marks()
    for request in range(REQUESTS):
        for token in range(TOKENS):
            now = 100.0 * request + 20.0 * token
            marks.times["stepped"].append(now)
            if token == 0:
                marks.times["sent"].append(now)
            for leg in LEGS:
                if leg.once and token:
                    continue
                now += 1.0
                marks.times[leg.until].append(now)
    return marks


def test_legs_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_path, "NEW_TOKENS", TOKENS)
    *legs, whole = legs_ms(passed(), REQUESTS, skipped=1)
    assert [row[0] for row in legs] == [f"{leg.until}: {leg.where}" for leg in LEGS]
    assert [row[1] for row in legs] == pytest.approx([1000.0] * len(LEGS))
    later = [row[2] for row in legs if row[2] is not None]
    assert len(later) == sum(not leg.once for leg in LEGS)
    assert whole[1:] == [pytest.approx(1000.0 * len(LEGS)), pytest.approx(1000.0 * len(later))]


def test_a_mark_that_was_missed_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_path, "NEW_TOKENS", TOKENS)
    marks = passed()
    marks.times["sampled"].pop()
    with pytest.raises(RuntimeError, match="'sampled': 5"):
        legs_ms(marks, REQUESTS, skipped=0)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["phase4_static", "phase8_prefix"])
def test_a_real_server_passes_every_mark(phase: str) -> None:
    package = find_phase(phase)
    config = package.Config(model="zoo:llama-tiny", max_seq_len=256)
    rows = measure(lambda: package.build_engine(config), 2, skipped=1)
    assert len(rows) == len(LEGS) + 1
    assert all(isinstance(row[1], float) and row[1] >= 0 for row in rows)
