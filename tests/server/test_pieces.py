"""Parts of the server, tested without a socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

import common.errors
from common.errors import StartupError
from common.server.api.answer import arriving
from common.server.api.stream import EventStream
from common.server.errors import from_exception
from tests.support.engines import build, continuation, greedy, tokens_of, working

# ---------------------------------------------------------------------- errors


def test_every_error_of_the_engine_has_a_code_of_its_own() -> None:
    for kind in vars(common.errors).values():
        if isinstance(kind, type) and issubclass(kind, Exception) and kind is not StartupError:
            assert from_exception(kind("it went wrong")).code != "internal_error", kind


# ---------------------------------------------------------------------- streams


class Connection:
    """An ASGI connection whose client reads at once, or never (`stalled`).

    As in the HTTP server, a client counts as disconnected once its response is complete.
    """

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.stalled = False
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
    connection: Connection, events: AsyncIterator[bytes], closed: list[bool] | None = None, **options: Any
) -> list[bool]:
    """Send a stream to its end. Returns the arguments of the calls of `on_close`, and adds them to `closed`."""
    closed = [] if closed is None else closed

    async def run() -> None:
        response = EventStream(events, on_close=closed.append, **options)
        scope = {"type": "http", "method": "GET"}
        await asyncio.wait_for(response(scope, connection.receive, connection.send), 30)

    asyncio.run(run())
    return closed


async def quiet(seconds: float) -> AsyncIterator[bytes]:
    yield b"first"
    await asyncio.sleep(seconds)
    yield b"last"


def test_quiet_streams_are_kept_open_by_comments() -> None:
    connection = Connection()
    assert serve(connection, quiet(0.5), ping_s=0.1) == [False]
    assert connection.sent[0] == b"first"
    sent = b"".join(connection.sent)
    assert sent.count(b": ping\n\n") >= 1
    assert sent.replace(b": ping\n\n", b"") == b"firstlast"


def test_a_client_that_leaves_ends_its_stream() -> None:
    ended: list[bool] = []

    async def endless() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"more"
                await asyncio.sleep(0)
                connection.left.set()
        finally:
            ended.append(True)

    connection = Connection()
    assert serve(connection, endless()) == [True]
    assert ended == [True]
    connection.stalled = True
    assert serve(connection, quiet(0)) == [True], "a client that reads nothing may leave, too"


def test_a_stream_that_raises_is_closed_and_raises() -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"first"
        raise ZeroDivisionError

    closed: list[bool] = []
    with pytest.raises(ZeroDivisionError):
        serve(Connection(), broken(), closed)
    assert closed == [False]


@pytest.mark.anyio
async def test_outputs_that_arrive_together_are_read_together() -> None:
    """The outputs of one step for several choices make one chunk of a stream."""
    async with working(build("chunked", clock=time.monotonic)) as async_engine:
        tasks = asyncio.all_tasks()
        with async_engine.hold_places(3):
            requests = [async_engine.maker.create(prompt, greedy(5)) for prompt in ("one", "two", "six")]
            streams = async_engine.submit(requests)
        lists = [arrived async for arrived in arriving(streams)]
        assert asyncio.all_tasks() == tasks, "reading needs no tasks of its own"
    for index, prompt in enumerate(("one", "two", "six")):
        outputs = [output for arrived in lists for number, output in arrived if number == index]
        assert tokens_of(outputs) == continuation(prompt.encode(), 5)
    assert len(lists) < 15, "fewer lists than outputs"
