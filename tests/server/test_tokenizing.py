"""Requests on their way to the engine: few are tokenized at once, the others wait with their places promised."""

from __future__ import annotations

import asyncio

import pytest

from common.server.app import create_app
from tests.engine_helpers import build
from tests.server.in_process import MODEL, HeldTokenizer, complete, until

QUEUE = 8
TOKENIZING_THREADS = 2


def test_few_at_once_and_the_others_keep_their_places() -> None:
    engine = build("continuous", max_waiting_requests=QUEUE)
    app = create_app(engine, model_name=MODEL)
    held = HeldTokenizer(engine)

    async def scenario() -> None:
        worker = app.state.server.worker
        async with app.router.lifespan_context(app):
            room = worker.queue_room()
            asked = [asyncio.create_task(complete(app, f"prompt {i}")) for i in range(room)]
            await until(lambda: worker.queue_room() == 0 and len(held.begun) == TOKENIZING_THREADS)
            assert (await complete(app, "one too many")).status == 503
            assert len(held.begun) == TOKENIZING_THREADS < room
            held.open.set()
            assert [answer.status for answer in await asyncio.gather(*asked)] == [200] * room
            assert sorted(held.begun) == sorted(f"prompt {i}" for i in range(room))
            await until(lambda: worker.queue_room() == room)

    asyncio.run(scenario())


def test_a_client_that_leaves_before_its_turn_gives_its_place_back(caplog: pytest.LogCaptureFixture) -> None:
    """One that leaves while it is tokenized, too; but its thread is free only when that is done."""
    caplog.set_level("INFO", "common.server.logs")
    engine = build("continuous", max_waiting_requests=QUEUE)
    app = create_app(engine, model_name=MODEL)
    held = HeldTokenizer(engine)

    async def scenario() -> None:
        worker = app.state.server.worker
        leaves = asyncio.Event()
        async with app.router.lifespan_context(app):
            room = worker.queue_room()
            running = [
                asyncio.create_task(complete(app, f"gone {i}", leaves)) for i in range(TOKENIZING_THREADS)
            ]
            await until(lambda: len(held.begun) == TOKENIZING_THREADS)
            waiting = asyncio.create_task(complete(app, "never", leaves))
            patient = asyncio.create_task(complete(app, "patient"))
            await until(lambda: worker.queue_room() == room - TOKENIZING_THREADS - 2)
            leaves.set()
            gone = await asyncio.gather(*running, waiting)
            assert [answer.status for answer in gone] == [499] * (TOKENIZING_THREADS + 1)
            dropped = [record for record in caplog.messages if record.startswith("dropped: the client left")]
            assert len(dropped) == TOKENIZING_THREADS + 1
            assert worker.queue_room() == room - 1
            assert len(held.begun) == TOKENIZING_THREADS, "the places are free, the threads are not"
            held.open.set()
            assert (await patient).status == 200
            await until(lambda: worker.queue_room() == room)
        assert held.begun[TOKENIZING_THREADS:] == ["patient"]
        assert engine.telemetry.counters.requests_added == 1

    asyncio.run(scenario())
