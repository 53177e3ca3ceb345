"""Parts of the server, tested without a socket."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

import common.errors
from common.errors import StartupError
from common.server.api.answer import interleave
from common.server.api.stream import EventStream
from common.server.app import create_app
from common.server.errors import HANDLERS, ApiError, from_exception, status_at
from common.server.http.backlogs import Backlogs
from common.server.service import served_model_name
from common.startup.phases import find_phase

# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "kind",
    [
        each
        for each in vars(common.errors).values()
        if isinstance(each, type) and issubclass(each, Exception) and each is not StartupError
    ],
)
def test_no_route_has_to_translate_an_error_of_the_engine(kind: type[Exception]) -> None:
    app = FastAPI(exception_handlers=HANDLERS)

    @app.get("/{prefix}/failing")
    def failing(prefix: str) -> None:
        raise kind("it went wrong")

    with TestClient(app) as client:  # it raises exceptions that have no handler
        for prefix in ("plain", "openai"):
            response = client.get(f"/{prefix}/failing")
            expected = from_exception(kind("it went wrong"))
            assert response.status_code == status_at(f"/{prefix}/failing", expected)
            assert response.json() == expected.body()
            assert expected.code != "internal_error"


def test_messages_are_short() -> None:
    assert len(str(ApiError(400, "\u2603" * 10**6, param="p" * 10**6, code="c").body()).encode()) < 4096


# ---------------------------------------------------------------------- streams


class Connection:
    """An ASGI connection whose client reads at once, or never (`stalled`).

    As in the HTTP server, a client counts as disconnected once its response is complete.
    """

    def __init__(self, *, stalled: bool = False) -> None:
        self.sent: list[bytes] = []
        self.stalled = stalled
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            if self.stalled:
                await asyncio.Event().wait()
            self.sent.append(message["body"])
            if not message["more_body"]:
                self.left.set()


def serve(
    connection: Connection, events: AsyncIterator[bytes], backlogs: Backlogs | None = None, **options: float
) -> list[str | None]:
    """Send a stream to its end. Returns the reasons with which it was closed."""
    closed: list[str | None] = []

    async def run() -> None:
        response = EventStream(events, on_close=closed.append, backlogs=backlogs or Backlogs(), **options)
        await asyncio.wait_for(response({"type": "http"}, connection.receive, connection.send), 30)

    asyncio.run(run())
    return closed


async def quiet(seconds: float) -> AsyncIterator[bytes]:
    yield b"first"
    await asyncio.sleep(seconds)
    yield b"last"


def test_quiet_streams_are_kept_open_by_comments() -> None:
    connection = Connection()
    assert serve(connection, quiet(0.5), ping_s=0.1) == [None]
    assert connection.sent[0] == b"first"
    sent = b"".join(connection.sent)
    assert sent.count(b": ping\n\n") >= 1
    assert sent.replace(b": ping\n\n", b"") == b"firstlast"


def test_a_reader_that_stalls_is_given_up() -> None:
    for options in ({}, {"ping_s": 0.01}):
        connection, backlogs = Connection(stalled=True), Backlogs(send_timeout_s=0.05)
        assert serve(connection, quiet(0), backlogs, **options) == ["the client took too little for 0.05 s"]
        assert connection.sent == []
        assert backlogs.bytes == 0


def test_a_stream_that_raises_is_closed_and_raises() -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"first"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        serve(Connection(), broken())


@pytest.mark.anyio
async def test_interleaved_items_come_as_they_come() -> None:
    async def count(numbers: list[int], turn: float) -> AsyncIterator[int]:
        for number in numbers:
            await asyncio.sleep(turn)
            yield number

    streams = [count([1, 2], 0.2), count([], 0), count([5, 6, 7], 0.01)]
    assert [item async for item in interleave(streams)] == [(2, 5), (2, 6), (2, 7), (0, 1), (0, 2)]


@pytest.mark.anyio
async def test_a_stream_that_is_alone_needs_no_task() -> None:
    async def count() -> AsyncIterator[int]:
        for number in range(3):
            await asyncio.sleep(0)
            yield number

    items, tasks = [], asyncio.all_tasks()
    async for item in interleave([count()]):
        assert asyncio.all_tasks() == tasks
        items.append(item)
    assert items == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.anyio
async def test_readers_may_stop_early_or_be_cancelled(count: int) -> None:
    cancelled: list[int] = []
    tasks = asyncio.all_tasks()

    async def endless(number: int, pause_s: float) -> AsyncIterator[int]:
        try:
            while True:
                await asyncio.sleep(pause_s)
                yield number
        except asyncio.CancelledError:
            cancelled.append(number)
            raise

    async def read(pause_s: float) -> int:
        streams = [endless(number, pause_s) for number in range(count)]
        async with contextlib.aclosing(interleave(streams)) as items:
            async for number, item in items:
                assert number == item
                return item
        raise AssertionError("nothing came")

    assert await read(0) in range(count)
    assert asyncio.all_tasks() == tasks
    cancelled.clear()
    reading = asyncio.create_task(read(3600))
    await asyncio.sleep(0.05)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert sorted(cancelled) == list(range(count))
    assert asyncio.all_tasks() == tasks


# ---------------------------------------------------------------------- the app


def test_served_names(tmp_path: Path) -> None:
    assert served_model_name("zoo:llama-tiny") == "zoo:llama-tiny"
    assert served_model_name("owner/name") == "owner/name"
    assert served_model_name(str(tmp_path)) == tmp_path.name


def test_an_app_around_a_ready_engine_leaves_no_thread_behind(phase: str) -> None:
    package = find_phase(phase)
    engine = package.build_engine(package.Config(model="zoo:llama-tiny", device="cpu", dtype="float32"))
    app = create_app(engine, model_name="mine")
    before = {thread.name for thread in threading.enumerate()}
    with TestClient(app) as client:
        assert "engine" in {thread.name for thread in threading.enumerate()}
        body = {"model": "mine", "prompt": "Once", "max_tokens": 3, "stream": False}
        assert client.post("/v1/completions", json=body).json()["model"] == "mine"
    assert "engine" not in {thread.name for thread in threading.enumerate()} - before
