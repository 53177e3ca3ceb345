"""Requests on their way to the engine: few are tokenized at once, the others wait with their places promised."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI

from common.engine import Engine
from common.server.app import create_app
from common.server.intake import TOKENIZING_THREADS
from tests.engine_helpers import build

QUEUE = 8


class HeldTokenizer:
    """Holds every `encode` of an engine's tokenizer until it is opened."""

    def __init__(self, engine: Engine) -> None:
        self.open = threading.Event()
        self.begun: list[str] = []
        self._encode = engine.tokenizer.encode
        engine.tokenizer.encode = self.encode

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.begun.append(text)
        assert self.open.wait(30)
        return self._encode(text, add_special_tokens=add_special_tokens)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def post(app: FastAPI, prompt: str, left: asyncio.Event) -> int:
    """The status of a completion, for a client that stays until `left`."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": False}
    unread = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        if unread:
            return unread.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await app(scope, receive, send)
    (status,) = statuses
    return status


def test_few_at_once_and_the_others_keep_their_places() -> None:
    engine = build("continuous", max_waiting_requests=QUEUE)
    app = create_app(engine, model_name="m")
    held = HeldTokenizer(engine)

    async def scenario() -> None:
        worker = app.state.server.worker
        stays = asyncio.Event()
        async with app.router.lifespan_context(app):
            room = worker.queue_room()
            asked = [asyncio.create_task(post(app, f"prompt {i}", stays)) for i in range(room)]
            await until(lambda: worker.queue_room() == 0 and len(held.begun) == TOKENIZING_THREADS)
            assert await post(app, "one too many", stays) == 503
            assert len(held.begun) == TOKENIZING_THREADS < room
            held.open.set()
            assert await asyncio.gather(*asked) == [200] * room
            assert sorted(held.begun) == sorted(f"prompt {i}" for i in range(room))
            await until(lambda: worker.queue_room() == room)

    asyncio.run(scenario())


def test_a_client_that_leaves_before_its_turn_gives_its_place_back(caplog: pytest.LogCaptureFixture) -> None:
    """One that leaves while it is tokenized, too; but its thread is free only when that is done."""
    caplog.set_level("INFO", "common.server.request_log")
    engine = build("continuous", max_waiting_requests=QUEUE)
    app = create_app(engine, model_name="m")
    held = HeldTokenizer(engine)

    async def scenario() -> None:
        worker = app.state.server.worker
        stays, leaves = asyncio.Event(), asyncio.Event()
        async with app.router.lifespan_context(app):
            room = worker.queue_room()
            running = [asyncio.create_task(post(app, f"gone {i}", leaves)) for i in range(TOKENIZING_THREADS)]
            await until(lambda: len(held.begun) == TOKENIZING_THREADS)
            waiting = asyncio.create_task(post(app, "never", leaves))
            patient = asyncio.create_task(post(app, "patient", stays))
            await until(lambda: worker.queue_room() == room - TOKENIZING_THREADS - 2)
            leaves.set()
            assert await asyncio.gather(*running, waiting) == [499] * (TOKENIZING_THREADS + 1)
            dropped = [record for record in caplog.messages if record.startswith("dropped: the client left")]
            assert len(dropped) == TOKENIZING_THREADS + 1
            assert worker.queue_room() == room - 1
            assert len(held.begun) == TOKENIZING_THREADS, "the places are free, the threads are not"
            held.open.set()
            assert await patient == 200
            await until(lambda: worker.queue_room() == room)
        assert held.begun[TOKENIZING_THREADS:] == ["patient"]
        assert engine.telemetry.counters.requests_added == 1

    asyncio.run(scenario())
