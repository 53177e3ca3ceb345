"""Bytes in and out of a connection: bodies, JSON answers, event streams, and clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.server.backlogs import Backlog, Backlogs, SlowReaderError

CLIENT_LEFT = "the client left"

T = TypeVar("T")


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


class EventStream(Response):
    """An HTTP response that sends events as they come, for as long as somebody takes them.

    Making them does not wait for the client: what it has not taken is a backlog.

    Args:
        events: the stream's bytes, whole events each.
        on_close: called once at the end, with what became of the client (it left, or it is too slow); None if it
            took everything.
        backlogs: where this stream's is counted.
        waits: makes nothing before what it has made is taken; for events that come as news, not as parts.
        ping_s: seconds between comments that keep idle connections open; none comes earlier.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        *,
        on_close: Callable[[str | None], None],
        backlogs: Backlogs,
        waits: bool = False,
        ping_s: float = 15.0,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.events = events
        self.on_close = on_close
        self.backlogs = backlogs
        self.waits = waits
        self.ping_s = ping_s
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        client_gone = None
        try:
            await while_connected(receive, self._send_all(send))
        except ClientDisconnect:
            client_gone = CLIENT_LEFT
        except SlowReaderError as error:
            # Returning from an unfinished response makes the HTTP server drop the connection.
            client_gone = str(error)
        finally:
            self.on_close(client_gone)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with self.backlogs.open() as backlog:
            sending = asyncio.create_task(self._send_backlog(send, backlog))
            making = asyncio.create_task(self._make(backlog))
            pinging = asyncio.create_task(self._ping(backlog))
            try:
                await asyncio.wait((sending, backlog.failed), return_when=asyncio.FIRST_COMPLETED)
                (backlog.failed if backlog.failed.done() else sending).result()
            finally:
                for task in (sending, making, pinging):
                    task.cancel()
                await asyncio.gather(sending, making, pinging, return_exceptions=True)
        # Nothing may be left to do after this: to `receive`, the client of a complete response has disconnected.
        await self._send(send, b"", more=False)

    async def _make(self, backlog: Backlog) -> None:
        try:
            async for chunk in self.events:
                backlog.put(chunk)
                if self.waits:
                    await backlog.all_taken()
        except Exception as error:
            backlog.fail(error)
        backlog.end()

    async def _ping(self, backlog: Backlog) -> None:
        while True:
            await asyncio.sleep(self.ping_s)
            backlog.put(b": ping\n\n")

    async def _send_backlog(self, send: Send, backlog: Backlog) -> None:
        while piece := await backlog.next_piece():
            await self._send(send, piece)
            backlog.taken(len(piece))

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        try:
            async with asyncio.timeout(self.backlogs.send_timeout_s):
                await send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError:
            raise SlowReaderError(
                f"the client took too little for {self.backlogs.send_timeout_s:g} s"
            ) from None


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client leaves first.

    Raises:
        ClientDisconnect: it did.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
