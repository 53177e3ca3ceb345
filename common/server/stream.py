"""Answers that come in pieces: event streams, their bytes that clients have not read yet, and clients that leave.

```text
stream       engine ─> events ─> Backlog ─> HTTP server (64 KiB) ─> kernel ─> client
JSON answer  engine ───────────────────────> HTTP server (all) ───> kernel ─> client
```

A client that reads more slowly than its answer is made leaves bytes behind. The kernel's buffers take the first of
them, the HTTP server's the next; a stream's others are in its backlog, a JSON answer is in the HTTP server whole.
The engine does not wait for slow readers, so their memory needs a bound.

**A client that leaves.** `while_connected` stops the work on its answer, and closing the answer cancels its
requests. At its next step the engine takes them out of the batch (in phase 4 with the whole batch) and frees their
memory.

**Streams that another process passes on.** A front of a cluster outlives the process that makes a stream. If that
process is lost, the client still needs the last event of each choice. Only the app knows the stream's wire format,
so it writes these events when the stream begins (`StreamEnds`).

```text
engine, app ── "infer.stream_ends" ──> front of a cluster ──> client
one process    whole events            another process
               ends: of each choice, and of the stream
               ended: those that the events so far contain
```

It is an ASGI extension. A server asks for it with `scope["extensions"][STREAM_ENDS] = {"error": ApiError}`, the
error that a lost stream ends with. Then the stream's messages have these fields more:

| message | field | value |
| --- | --- | --- |
| `http.response.start` | `ends` | the last event of each choice, then the stream's own end |
| `http.response.body` | `ended` | indices into `ends` of what has been sent; each body is whole events |
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, ClassVar, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.request import StepOutput
from common.server.errors import ApiError
from common.server.replies.answer import Answer, Choice, WireFormat

CLIENT_LEFT = "the client left"

#: The ASGI extension by which a process that passes a stream on asks for its ends.
STREAM_ENDS = "infer.stream_ends"

T = TypeVar("T")

#: Bytes that are handed on at once. A client's progress is seen from one piece to the next.
PIECE_BYTES = 16 * 1024
#: A client with fewer unread bytes is never given up for the total: a quick reader may have as many for a moment.
FLOOR_BYTES = 64 * 1024


class Stream(Response):
    """An HTTP response that sends bytes as they come, until they end or the client leaves.

    Making them does not wait for the client: bytes that it has not taken are a backlog.

    Args:
        chunks: the stream's bytes.
        on_close: called once at the end with the reason why the client did not get everything: it left, or it is
            too slow. None if it took everything.
        backlogs: counts this stream's backlog.
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
        """Send the backlog's bytes as they arrive.

        If `ends` is given, each message holds whole events and lists the end events that were produced by then.
        """
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
    """Return the result of `work`, which is cancelled if the client leaves first.

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


class Backlog:
    """One stream's bytes that its client has not taken. Context manager: forgets the rest at its end.

    Attributes:
        failed: raises the error that ended the stream: its client is too slow, or an event could not be made.
    """

    def __init__(self, backlogs: Backlogs) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._limit_bytes = backlogs.limit_bytes
        self._unread = Unread(backlogs, self.fail)
        self._made = bytearray()
        self._ended = False
        self._news = asyncio.Event()
        self._empty = asyncio.Event()

    @property
    def unread_bytes(self) -> int:
        """Number of bytes that were made and not taken."""
        return self._unread.bytes

    def __enter__(self) -> Backlog:
        return self

    def __exit__(self, *_: object) -> None:
        self._unread.forget()
        self.failed.cancel()

    def put(self, chunk: bytes) -> None:
        """Add bytes of the stream. A stream that failed takes none."""
        if self.failed.done():
            return
        self._made += chunk
        self._news.set()
        self._unread.add(len(chunk))
        if self.unread_bytes > self._limit_bytes and not self.failed.done():
            self._unread.give_up("over --max-unread-bytes")

    def end(self) -> None:
        """Mark the stream as complete."""
        self._ended = True
        self._news.set()

    def fail(self, error: Exception) -> None:
        """End the stream with an error. Bytes that its client has not taken are freed."""
        if not self.failed.done():
            self.failed.set_exception(error)
            self._unread.forget()
            self._made.clear()

    @property
    def ended(self) -> bool:
        """True if all of the stream has been made."""
        return self._ended

    async def next_piece(self, limit: int | None = PIECE_BYTES) -> bytes:
        """Return the next bytes once there are some; none at the stream's end. Call `taken` when they are sent.

        Args:
            limit: bytes at the most; None: everything that was made so far, which is whole events.
        """
        while not self._made and not self._ended:
            self._news.clear()
            await self._news.wait()
        piece = bytes(self._made[:limit])
        del self._made[:limit]
        return piece

    def taken(self, count: int) -> None:
        """Count bytes as taken by the client."""
        self._unread.add(-count)
        if not self.unread_bytes:
            self._empty.set()

    async def all_taken(self) -> None:
        """Wait until the client has taken all bytes made so far."""
        self._empty.clear()
        if self.unread_bytes:
            await self._empty.wait()


class Backlogs:
    """The bytes of all clients that they have not read.

    Args:
        limit_bytes: bound for one stream; a stream with more is given up.
        total_limit_bytes: bound for all clients together. Beyond it, the client with the most is given up, unless
            that has less than `FLOOR_BYTES`.
        send_timeout_s: seconds within which the HTTP server must take a piece. It holds 64 KiB of a
            connection's bytes, and takes more when 16 KiB are left.

    Attributes:
        bytes: number of unread bytes.
        unread: one `Unread` for each client that has unread bytes.
    """

    def __init__(
        self,
        limit_bytes: int = 4 * 2**20,
        total_limit_bytes: int = 64 * 2**20,
        send_timeout_s: float = 60.0,
    ) -> None:
        self.send_timeout_s = send_timeout_s
        self.limit_bytes = limit_bytes
        self._total_limit_bytes = total_limit_bytes
        self.bytes = 0
        self.unread: set[Unread] = set()

    def open(self) -> Backlog:
        """Return the backlog of a new stream."""
        return Backlog(self)

    def relieve(self) -> None:
        """Give up clients until the total is within its bound, the one with the most bytes first."""
        while self.bytes > self._total_limit_bytes:
            most = max(self.unread, key=lambda each: each.bytes)
            if most.bytes < FLOOR_BYTES:
                return
            most.give_up("the most of all, over --max-total-unread-bytes")


class Unread:
    """One client's part of the bytes that clients have not read.

    Args:
        backlogs: all clients' bytes.
        give_up: ends the answer; called at most once, and the client's bytes have left the total by then.

    Attributes:
        bytes: number of bytes that this client has not read.
    """

    def __init__(self, backlogs: Backlogs, give_up: Callable[[SlowReaderError], None]) -> None:
        self.bytes = 0
        self._backlogs = backlogs
        self._give_up = give_up
        backlogs.unread.add(self)

    def add(self, count: int) -> None:
        """Add bytes, or take some away if `count` is negative. May give up clients, this one included."""
        if self not in self._backlogs.unread:  # given up
            return
        self.bytes += count
        self._backlogs.bytes += count
        if count > 0:
            self._backlogs.relieve()

    def give_up(self, reason: str) -> None:
        """End the answer: the client has left too much of it."""
        left = self.bytes
        self.forget()
        self._give_up(SlowReaderError(f"the client left {left} bytes unread, {reason}"))

    def forget(self) -> None:
        """Take the client's bytes out of the total, for good."""
        if self in self._backlogs.unread:
            self._backlogs.unread.remove(self)
            self._backlogs.bytes -= self.bytes


class SlowReaderError(Exception):
    """Ends an answer that its client does not take. The message says how many bytes it left."""


class StreamEnds:
    """Writes the last events of one answer's stream, and tells which of them have been made."""

    def __init__(self, answer: Answer, wire: WireFormat) -> None:
        self._answer = answer
        self._wire = wire

    def write(self, error: ApiError) -> tuple[bytes, ...]:
        """Return the event that ends each choice with this error, by index, and last the stream's own end."""
        choices = (self._wire.events(choice, _failed(choice, error)) for choice in self._answer.choices)
        return (*choices, self._wire.last)

    def made(self, *, complete: bool) -> frozenset[int]:
        """Return the indices of the ends that the app has made itself.

        Args:
            complete: whether the whole stream has been made, its own end included.
        """
        choices = self._answer.choices
        ended = [choice.index for choice in choices if choice.ended]
        return frozenset([*ended, len(choices)] if complete else ended)


def _failed(choice: Choice, error: ApiError) -> StepOutput:
    return StepOutput(
        request_id="",
        token_id=None,
        text_delta="",
        finished=True,
        finish_reason=None,
        error=error,
        prompt_tokens=choice.prompt_tokens,
        completion_tokens=choice.completion_tokens,
    )
