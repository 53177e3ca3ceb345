"""Bytes in and out of a connection: bodies, JSON answers, event streams, and clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

CLIENT_LEFT = "the client left"

T = TypeVar("T")


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


class EventStream(Response):
    """An HTTP response that sends events as they come, for as long as somebody takes them.

    Args:
        events: the stream's bytes, whole events each.
        on_close: called once at the end, with what became of the client (it left, or it stalled); None if it took
            everything.
        ping_s: seconds between comments that keep idle connections open; none comes earlier.
        send_timeout_s: a client that has taken nothing for so many seconds is given up.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        *,
        on_close: Callable[[str | None], None],
        ping_s: float = 15.0,
        send_timeout_s: float = 60.0,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.events = events
        self.on_close = on_close
        self.ping_s = ping_s
        self.send_timeout_s = send_timeout_s
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        client_gone = None
        try:
            await while_connected(receive, self._send_all(send))
        except ClientDisconnect:
            client_gone = CLIENT_LEFT
        except TimeoutError:
            # Returning from an unfinished response makes the HTTP server drop the connection.
            client_gone = f"the client took nothing for {self.send_timeout_s:g} s"
        finally:
            self.on_close(client_gone)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pinging = asyncio.create_task(self._ping(send))
        try:
            async for chunk in self.events:
                await self._send(send, chunk)
        finally:
            pinging.cancel()
            await asyncio.gather(pinging, return_exceptions=True)
        # Nothing may be left to do after this: to `receive`, the client of a complete response has disconnected.
        await self._send(send, b"", more=False)

    async def _ping(self, send: Send) -> None:
        while True:
            await asyncio.sleep(self.ping_s)
            await self._send(send, b": ping\n\n")

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        async with asyncio.timeout(self.send_timeout_s):
            await send({"type": "http.response.body", "body": body, "more_body": more})


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
