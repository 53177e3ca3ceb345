"""The pulse: every few seconds a line in the log under load, and freed memory goes back."""

from __future__ import annotations

import asyncio
import logging
import platform
import threading
import time
from pathlib import Path

import psutil
import pytest

from common.server import logs
from common.server.logs import FIELDS, Pulse
from tests.support.engines import build, greedy, read, until, working

pytestmark = pytest.mark.anyio


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == logs.__name__]


async def test_a_busy_server_says_how_busy_and_an_idle_one_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(logs, "PULSE_EVERY_S", 0.01)
    engine = build("continuous", clock=time.monotonic)
    gate, held = threading.Event(), threading.Event()
    step = engine.step

    def held_step() -> list[object]:
        if engine.telemetry.counters.steps == 3:
            held.set()
            gate.wait()
        return step()

    monkeypatch.setattr(engine, "step", held_step)
    async with working(engine) as async_engine:
        beating = asyncio.create_task(Pulse(async_engine).run())
        await asyncio.sleep(0.05)
        assert not lines(caplog)
        with async_engine.hold_places(2):  # both at once, so that they are in the same steps
            streams = async_engine.submit(
                [async_engine.maker.create(prompt, greedy(8)) for prompt in ("one", "two")]
            )
        await until(held.is_set)
        before = len(lines(caplog))
        await until(lambda: len(lines(caplog)) > before + 1)
        assert "the present step" in lines(caplog)[-1].message
        fields = getattr(lines(caplog)[-1], FIELDS)
        assert (fields["running"], fields["waiting"]) == (2, 0)
        assert 0 < fields["kv_use"] <= 1
        told = [getattr(line, FIELDS) for line in lines(caplog)]
        assert sum(each["new_tokens_per_s"] for each in told) > 0
        gate.set()
        await asyncio.gather(*map(read, streams))
        await until(lambda: not engine.telemetry.latest.active)
        count = len(lines(caplog))
        await asyncio.sleep(0.05)
        assert len(lines(caplog)) - count <= 1  # one line may have been due
        beating.cancel()


FREED_MB = 150


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists() or platform.libc_ver()[0] != "glibc", reason="of GNU's C library"
)
async def test_memory_that_was_freed_goes_back_with_the_next_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept objects lie between freed ones, so the allocator cannot return the end of its heap by itself."""
    monkeypatch.setattr(logs, "PULSE_EVERY_S", 0.01)
    process = psutil.Process()
    engine = build("continuous", clock=time.monotonic)
    async with working(engine) as async_engine:
        objects = [bytes(1000) for _ in range(FREED_MB * 1000)]
        kept = objects[::500]
        full = process.memory_info().rss
        del objects
        beating = asyncio.create_task(Pulse(async_engine).run())
        await until(lambda: full - process.memory_info().rss > FREED_MB * 1e6 / 2)
        assert kept[-1] == bytes(1000)
        beating.cancel()
