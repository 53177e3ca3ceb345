"""The ring buffer of steps and its pages: bounded, in order, and readable to the end while the engine runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from common.engine.telemetry import PAGE_STEPS, Telemetry


def run_steps(telemetry: Telemetry, count: int) -> None:
    for _ in range(count):
        record = telemetry.begin_step(float(telemetry.counters.steps))
        record.decode_tokens = 2
        telemetry.end_step(record.started_s + 0.5)


def steps_of(page: dict[str, Any]) -> list[int]:
    return [record["step"] for record in page["steps"]]


def pages(telemetry: Telemetry, since_step: int) -> Iterator[dict[str, Any]]:
    """Yield pages until no step is left."""
    while True:
        page = telemetry.snapshot(since_step=since_step)
        yield page
        since_step = page["next_step"]
        if since_step >= page["counters"]["steps"]:
            return


def test_a_page_is_bounded_and_of_plain_values() -> None:
    telemetry = Telemetry()
    run_steps(telemetry, 3 * PAGE_STEPS)
    page = telemetry.snapshot(since_step=7)
    assert steps_of(page) == list(range(7, 7 + PAGE_STEPS))
    assert page["next_step"] == 7 + PAGE_STEPS
    assert page["steps"] == [asdict(record) for record in telemetry.records][7 : 7 + PAGE_STEPS]
    assert page["counters"] == asdict(telemetry.counters)
    assert page["counters"]["decode_tokens"] == 2 * 3 * PAGE_STEPS


def test_the_oldest_steps_make_room_for_new_ones() -> None:
    telemetry = Telemetry(capacity=600)
    run_steps(telemetry, 1000)
    for since_step in (0, 399, 400):
        assert steps_of(telemetry.snapshot(since_step=since_step))[0] == 400
    assert steps_of(telemetry.snapshot(since_step=401))[0] == 401
    told = [step for page in pages(telemetry, 0) for step in steps_of(page)]
    assert told == list(range(400, 1000))
    run_steps(telemetry, 600)
    assert steps_of(telemetry.snapshot(since_step=1000)) == list(range(1000, 1000 + PAGE_STEPS))


def test_a_reader_of_pages_gets_each_step_once_while_steps_go_on() -> None:
    steps = 20_000
    telemetry = Telemetry(capacity=steps)
    engine = threading.Thread(target=run_steps, args=(telemetry, steps))
    engine.start()
    told: list[int] = []
    while len(told) < steps and (engine.is_alive() or telemetry.counters.steps > len(told)):
        page = telemetry.snapshot(since_step=len(told))
        told += steps_of(page)
        assert page["next_step"] == len(told) <= page["counters"]["steps"]
    engine.join()
    assert told == list(range(steps))
