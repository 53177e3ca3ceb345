"""Bytes in and out of a connection: bodies, JSON answers, event streams, and clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.server.backlogs import PIECE_BYTES, Backlog, Backlogs, SlowReaderError

if TYPE_CHECKING:
    from common.server.stream_ends import StreamEnds

CLIENT_LEFT = "the client left"

#: The ASGI extension by which a process that passes a stream on asks for its ends (`common.server.stream_ends`).
STREAM_ENDS = "infer.stream_ends"

T = TypeVar("T")


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


class Stream(Response):
    """An HTTP response that sends bytes as they come, until they end or the client leaves.

    Making them does not wait for the client: bytes that it has not taken are a backlog.

    Args:
        chunks: the stream's bytes.
        on_close: called once at the end with the reason why the client did not get everything: it left, or it is
            too slow. None if it took everything.
        backlogs: where this stream's backlog is counted.
        waits: produce the next chunk only after the client has taken the last one, for live updates, where an old
            chunk is worthless.
        ping_s: seconds between pings.
        ends: writes the stream's last events for a process that passes it on; None: a cut stream just ends.

    Attributes:
        headers_of_all: headers that all streams of a class have.
        ping: bytes without a meaning that keep idle connections open.
    """

    headers_of_all: ClassVar[Mapping[str, str]]
    ping: ClassVar[bytes]

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        *,
        on_close: Callable[[str | None], None],
        backlogs: Backlogs,
        waits: bool = False,
        ping_s: float = 15.0,
        ends: StreamEnds | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.chunks = chunks
        self.on_close = on_close
        self.backlogs = backlogs
        self.waits = waits
        self.ping_s = ping_s
        self.ends = ends
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no", **self.headers_of_all})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        passed_on: dict[str, Any] | None = scope.get("extensions", {}).get(STREAM_ENDS)
        client_gone = None
        try:
            await while_connected(receive, self._send_all(send, passed_on))
        except ClientDisconnect:
            client_gone = CLIENT_LEFT
        except SlowReaderError as error:
            # Returning from an unfinished response makes the HTTP server drop the connection.
            client_gone = str(error)
        finally:
            self.on_close(client_gone)

    async def _send_all(self, send: Send, passed_on: dict[str, Any] | None) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        ends = None if passed_on is None else self.ends
        if passed_on is not None and ends is not None:
            start["ends"] = ends.write(passed_on["error"])
        await send(start)
        with self.backlogs.open() as backlog:
            sending = asyncio.create_task(self._send_backlog(send, backlog, ends))
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
            async for chunk in self.chunks:
                backlog.put(chunk)
                if self.waits:
                    await backlog.all_taken()
        except Exception as error:
            backlog.fail(error)
        backlog.end()

    async def _ping(self, backlog: Backlog) -> None:
        while True:
            await asyncio.sleep(self.ping_s)
            backlog.put(self.ping)

    async def _send_backlog(self, send: Send, backlog: Backlog, ends: StreamEnds | None) -> None:
        """Send what is made. A stream with `ends` goes in whole events, each with what has ended by then."""
        while piece := await backlog.next_piece(PIECE_BYTES if ends is None else None):
            fields: dict[str, Any] = {} if ends is None else {"ended": ends.made(complete=backlog.ended)}
            await self._send(send, piece, **fields)
            backlog.taken(len(piece))

    async def _send(self, send: Send, body: bytes, *, more: bool = True, **fields: Any) -> None:
        try:
            async with asyncio.timeout(self.backlogs.send_timeout_s):
                await send({"type": "http.response.body", "body": body, "more_body": more, **fields})
        except TimeoutError:
            raise SlowReaderError(
                f"the client took too little for {self.backlogs.send_timeout_s:g} s"
            ) from None


class EventStream(Stream):
    """A stream of server-sent events; each chunk is whole events."""

    media_type = "text/event-stream"
    headers_of_all: ClassVar[Mapping[str, str]] = {}
    ping = b": ping\n\n"


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
