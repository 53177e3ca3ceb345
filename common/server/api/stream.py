"""Answers that are sent in pieces (streams), and clients that leave early. `backlogs` counts unread bytes.

**A client that leaves.** `while_connected` stops the work on its answer. Then `close` in `routes.generate` calls
`Answer.cancel`, which reaches `Engine.cancel` through the engine thread's inbox. When it plans its next step, the
engine takes the requests out of the batch and frees their memory. (Phase 4 does so when its whole batch has ended,
and phases 9 and 10 when no step in flight has them.)

**Streams that another process passes on.** A front of a cluster outlives the process that makes a stream. If that
process is lost, the client still needs the last event of each choice. Only the app knows the stream's wire format,
so it writes these events when the stream begins (`StreamEnds`).

```text
engine, app ── "infer.stream_ends" ──> front of a cluster ──> client
one process    whole events            another process
               ends: of each choice, and of the stream
               ended: the ends among the events so far
```

`infer.stream_ends` is an ASGI extension. A server asks for it with
`scope["extensions"][STREAM_ENDS] = {"error": ApiError}`, the error that a lost stream ends with. Then the stream's
messages have these additional fields:

| message | field | value |
| --- | --- | --- |
| `http.response.start` | `ends` | the last event of each choice, then the stream's own end |
| `http.response.body` | `ended` | indices of the events in `ends` that were sent so far; a body has whole events |
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, ClassVar, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.request import StepOutput
from common.server.api.answer import WireFormat
from common.server.errors import ApiError
from common.server.http.backlogs import PIECE_BYTES, Backlog, Backlogs, SlowReaderError

CLIENT_LEFT = "the client left"

#: The ASGI extension by which a process that passes a stream on asks for the stream's last events.
STREAM_ENDS = "infer.stream_ends"

T = TypeVar("T")


class Stream(Response):
    """An HTTP response that sends bytes as they come, until they end, or the client leaves or is too slow.

    Unless `waits` is set, producing bytes does not wait for the client: bytes that it has not taken go into a
    backlog.

    Args:
        chunks: the stream's bytes.
        on_close: called once at the end with the reason why the client did not get everything: the client left, or
            is too slow. None if it took everything, or the server failed.
        backlogs: counts this stream's backlog.
        waits: produce the next chunk only after the client has taken the previous one, for live updates, where an
            old chunk is worthless.
        ping: bytes without a meaning that keep idle connections open; None: those of the class.
        ping_s: seconds between pings.
        ends: writes the stream's last events for a process that passes the stream on. None: the stream breaks off
            if that process loses this process.

    Attributes:
        headers_of_all: headers that all streams of a class have.
        ping: bytes without a meaning that keep idle connections open.
    """

    headers_of_all: ClassVar[Mapping[str, str]]
    ping: bytes

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        *,
        on_close: Callable[[str | None], None],
        backlogs: Backlogs,
        waits: bool = False,
        ping: bytes | None = None,
        ping_s: float = 15.0,
        ends: StreamEnds | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.chunks = chunks
        self.on_close = on_close
        self.backlogs = backlogs
        self.waits = waits
        self.ping = self.ping if ping is None else ping
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
        # This must come last: `receive` reports a complete response as a disconnect, and that cancels this task.
        try:
            async with asyncio.timeout(self.backlogs.send_timeout_s):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            raise self.backlogs.too_slow() from None

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
        """Send the backlog's bytes as they arrive.

        If `ends` is given, each message holds whole events, and lists the end events that this
        and the earlier messages hold.
        """
        while piece := await backlog.next_piece(PIECE_BYTES if ends is None else None):
            fields: dict[str, Any] = {} if ends is None else {"ended": ends.made(complete=backlog.ended)}
            await send({"type": "http.response.body", "body": piece, "more_body": True, **fields})
            backlog.taken(len(piece))


class EventStream(Stream):
    """A stream of server-sent events. Each chunk consists of whole events."""

    media_type = "text/event-stream"
    headers_of_all: ClassVar[Mapping[str, str]] = {}
    ping = b": ping\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` and return its result. If the client leaves first, `work` is cancelled.

    Raises:
        ClientDisconnect: the client left first.
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


class StreamEnds:
    """Writes the last events of one answer's stream, and tells which of them the app has produced already."""

    def __init__(self, wire: WireFormat) -> None:
        self._wire = wire

    def write(self, error: ApiError) -> tuple[bytes, ...]:
        """Return the event that ends each choice with `error`, in order, and last the bytes that end the stream."""
        failed = StepOutput(
            request_id="",
            token_id=None,
            text_delta="",
            text_offset=0,
            finished=True,
            finish_reason=None,
            error=error,
            prompt_tokens=0,
            completion_tokens=0,
        )
        choices = (self._wire.lost(choice, failed) for choice in self._wire.answer.choices)
        return (*choices, self._wire.last)

    def made(self, *, complete: bool) -> frozenset[int]:
        """Return the indices of the end events that the app has produced by now.

        Args:
            complete: whether the whole stream has been produced, its own end included.
        """
        choices = self._wire.answer.choices
        ended = [choice.index for choice in choices if choice.ended]
        return frozenset([*ended, len(choices)] if complete else ended)
