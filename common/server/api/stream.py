"""Answers that are sent as events, and clients that leave early.

**A client that leaves.** `EventStream` and `while_connected` stop the work on its answer. Then `close` in
`routes.generate` calls `Answer.cancel`, which reaches `Engine.cancel` by a message. When it plans its next step,
the engine takes the requests out of the batch and frees their memory. (Phase 4 does so when its whole batch has
ended, and phases 9 and 10 when no step in flight has them.)

**A client that reads slowly.** The next events are made only after the HTTP server has taken the previous ones.
Until then, the engine's outputs wait in their `RequestStream`. A client that takes nothing is dropped by its
connection (`common.server.http.connections`).

**Streams that another process passes on.** A front of a cluster outlives the process that makes a stream. If that
process is lost, the client still needs a last event. Only the app knows the stream's wire format, so it writes this
event when the stream begins. The front asks for it by an ASGI extension:
`scope["extensions"][LOST_STREAM] = {"error": ApiError}`. Then the message `http.response.start` has a field `lost`:
the bytes that end the stream with this error, at whatever event it breaks off.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import orjson
from sse_starlette.sse import AppStatus, EventSourceResponse
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from common.server.errors import ApiError

#: The ASGI extension by which a process that passes a stream on asks for the end of a lost stream.
LOST_STREAM = "infer.lost_stream"

T = TypeVar("T")

# The library would cut all streams at the server's shutdown. `common.server.run.Server` lets them end.
AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]


def event(data: Mapping[str, object], name: str | None = None) -> bytes:
    """Encode one server-sent event. JSON has no raw line ends, so `data` is always one line."""
    line = b"data: %b\n\n" % orjson.dumps(data)
    return line if name is None else b"event: %b\n%b" % (name.encode(), line)


class EventStream(EventSourceResponse):
    """An HTTP response that sends chunks of bytes as they come, until they end or the client leaves.

    Args:
        chunks: the stream's bytes; each chunk consists of whole events.
        on_close: called once at the end, with True if the client left before it had everything.
        ping: bytes without a meaning that keep idle connections open; None: a comment.
        ping_s: seconds between pings.
        lost: returns the bytes that end the stream with an error; None: it can break off.
    """

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        *,
        on_close: Callable[[bool], None] = lambda _: None,
        ping: bytes | None = None,
        ping_s: float = 15.0,
        lost: Callable[[ApiError], bytes] | None = None,
        media_type: str = "text/event-stream",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            chunks,
            headers=headers,
            media_type=media_type,
            ping=ping_s,
            ping_message_factory=lambda: ping or b": ping\n\n",  # type: ignore[arg-type,return-value]  # bytes are sent as they are
        )
        del self.headers["connection"]  # HTTP/1.1 keeps connections open anyway
        self.on_close = on_close
        self.lost = lost

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        passed_on: dict[str, Any] | None = scope.get("extensions", {}).get(LOST_STREAM)
        complete = failed = False

        async def send_and_note(message: Message) -> None:
            nonlocal complete
            if passed_on is not None and self.lost is not None and message["type"] == "http.response.start":
                message["lost"] = self.lost(passed_on["error"])
            await send(message)
            complete = message.get("more_body") is False

        try:
            await super().__call__(scope, receive, send_and_note)
        except Exception:
            failed = True
            raise
        finally:
            self.on_close(not complete and not failed)

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        """Send a message without the library's timeout, which costs more than a token's other way through here.

        Connections have a timeout of their own, for streams and whole answers alike.
        """
        await send(message)


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
