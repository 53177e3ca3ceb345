"""Connections to clients: bounds on their number and time, and the answer to bytes that are not HTTP.

```text
opened ──> waits for a request ──> its head comes ──> its body comes ──> answered ──> waits again
           keep-alive timeout      body timeout       body timeout,      before the whole request has come:
           closed                  408, closed        see `bodies`       the rest is dropped, lingering close
```

uvicorn itself has a timeout for the wait between two requests, and no others.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import select
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import h11
import orjson
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from common.server.errors import ApiError, unavailable
from common.server.http.framing import BoundedParser
from common.server.http.middleware import OPEN_PATHS, ip_address, refuse, without_root
from common.server.http.sockets import SPARE_CONNECTIONS, LingeringTransport
from common.server.logs import log_refusal

logger = logging.getLogger(__name__)

#: Timeouts of a connection beyond the bound on their number, in seconds: for a request's head, and between
#: requests.
SPARE_TIMEOUT_S = 5.0
#: If a client takes fewer bytes than this of its answer within `send_s`, its connection is closed.
MUST_TAKE_BYTES = 48 * 1024
#: Bytes of a request's head at the most.
MAX_HEAD_BYTES = 16 * 1024
#: Used in place of `LINGER_S` at the server's shutdown, when clients get less time.
LAST_LINGER_S = 0.5
#: Bytes that a client may send behind a request whose answer is being made. A connection with more is closed.
MAX_PIPELINED_BYTES = 64 * 1024
#: Seconds between two warnings about too many connections, at least.
WARN_EVERY_S = 10.0
#: Most seconds that a client may go on sending after an answer that ends its connection.
LINGER_S = 5.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds on the number of connections, and on the time that each may take.

    Attributes:
        connections: number of connections at a time.
        per_address: connections at a time of one address; by default half of `connections`. Loopback and Unix
            sockets have no bound of their own, since all clients of a proxy on this machine have the same address.
        keep_alive_s: time that a connection may stay open without a request.
        receive_s: time for the head of a request to come, from its first byte on.
        send_s: time in which a client must take `MUST_TAKE_BYTES` of an answer, once over 64 KiB wait for it and
            until 16 KiB are left.
    """

    connections: int = 1024
    per_address: int | None = None
    keep_alive_s: float = 60.0
    receive_s: float = 30.0
    send_s: float = 60.0


class Config(uvicorn.Config):
    """The HTTP server's settings, with limits for its connections.

    Args:
        limits: bounds of connections.
        answers: the number of answers by status and error code, by default a new counter. Requests that connections
            refuse without the app are added to it.
        path_prefix: prefix that a proxy puts before every path.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: ConnectionLimits,
        answers: Counter[tuple[int, str]] | None = None,
        path_prefix: str = "",
        **settings: Any,
    ) -> None:
        super().__init__(app, http=Connection, **settings)
        self.limits = limits
        self.answers = Counter() if answers is None else answers
        self.path_prefix = path_prefix
        self.addresses: Counter[str] = Counter()  # number of connections of each address
        self.last_warning_s = -WARN_EVERY_S

    def beyond(self, connections: int, address: str | None) -> int:
        """Return by how many connections a bound is exceeded: the bound on all, or the bound on one address.

        If both are exceeded, the larger excess is returned. 0 or less: neither is exceeded. Logs a warning if one
        is.

        Args:
            connections: number of open connections.
            address: the address whose bound is checked; None: it has none.
        """
        limits = self.limits
        beyond = connections - limits.connections
        if beyond > 0:
            self._warn("%d connections are open, the most that --max-connections allows", limits.connections)
        per_address = limits.connections // 2 if limits.per_address is None else limits.per_address
        beyond_here = self.addresses[address] - per_address if address is not None else 0
        if beyond_here > 0:
            self._warn(
                "%d connections of %s are open, the most that --max-connections-per-address allows",
                per_address,
                address,
            )
        return max(beyond, beyond_here)

    def forget(self, address: str) -> None:
        """Count a connection of an address as closed."""
        self.addresses[address] -= 1
        if not self.addresses[address]:
            del self.addresses[address]

    def _warn(self, message: str, *values: object) -> None:
        """Log a warning, at most one in `WARN_EVERY_S` seconds: a client may open thousands of connections."""
        if time.monotonic() - self.last_warning_s >= WARN_EVERY_S:
            self.last_warning_s = time.monotonic()
            logger.warning(f"{message}: more are refused", *values)


class TooMany:
    """The app for connections beyond the bound on their number. It refuses all paths but `OPEN_PATHS`."""

    def __init__(self, app: ASGIApp, answers: Counter[tuple[int, str]], path_prefix: str) -> None:
        self.app = app
        self._answers = answers
        self._path_prefix = path_prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if without_root(scope["path"], self._path_prefix) in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        refusal = unavailable(
            "too many connections are open, of all clients or of one address (the server's options "
            "--max-connections and --max-connections-per-address); try again shortly",
            code="too_many_connections",
            retry_after_s=1,
        )
        refusal.headers["Connection"] = "close"
        self._answers[refusal.status, refusal.code] += 1
        await refuse(refusal, scope, receive, send)


class Connection(H11Protocol):
    """uvicorn's connection, with limits on connections, on the time of a request or an answer, and on buffers."""

    config: Config

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, "client_left": self._client_left}, _loop)
        self.conn: BoundedParser = BoundedParser(config.h11_max_incomplete_event_size or MAX_HEAD_BYTES)
        self._address: str | None = None
        self._receive_s = config.limits.receive_s
        self._keep_alive_s = config.limits.keep_alive_s
        self._next_turn: asyncio.Handle | None = None  # parses the events that the last turn left
        self._receiving: asyncio.TimerHandle | None = None  # ends a request that does not come whole
        self._sending: asyncio.TimerHandle | None = None  # ends an answer that is not taken

    # ------------------------------------------------------------------ opened and closed

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        linger_s = min(self.config.limits.receive_s, LINGER_S)
        self._lingering = LingeringTransport(transport, self._may_be_sending, linger_s)
        super().connection_made(self._lingering)
        self.flow = Flow(self._lingering, self.conn)
        self._address = None if self.client is None else counted_address(self.client[0])
        if self._address is not None:
            self.config.addresses[self._address] += 1
        beyond = self.config.beyond(len(self.connections), self._address)
        if beyond > 0:
            self.app = TooMany(self.app, self.config.answers, self.config.path_prefix)
            self._receive_s = self._keep_alive_s = SPARE_TIMEOUT_S
        if beyond > SPARE_CONNECTIONS:
            transport.abort()
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._address is not None:
            self.config.forget(self._address)
        self._lingering.on_lost()
        self._unset_keepalive_if_required()
        self._stop_receiving()
        self._stop_sending()

    def shutdown(self) -> None:
        """Close the connection at the server's shutdown.

        If an answer is being made, the connection closes when the answer is complete. Otherwise it closes now, or
        within `LAST_LINGER_S` seconds if the client may be sending.
        """
        super().shutdown()
        self._lingering.hurry(LAST_LINGER_S)

    def _client_left(self) -> bool:
        """Close the connection if the client has closed it. Returns whether the connection is closed or closing.

        While a body waits to be read, its bytes hide the end of the connection from the event loop. On Linux, the
        kernel tells of the end before the bytes are read. On other systems, the end is not noticed here.
        """
        if sys.platform == "linux" and not self.transport.is_closing():
            poll = select.poll()
            poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
            if poll.poll(0):
                self.transport.abort()
        return self.transport.is_closing()

    def _may_be_sending(self) -> bool:
        """Return whether the client may be in the middle of a request."""
        state = self.conn.their_state
        return state in (h11.SEND_BODY, h11.ERROR) or (state is h11.IDLE and self._unparsed_bytes() > 0)

    def _unparsed_bytes(self) -> int:
        return len(self.conn.trailing_data[0])

    # ------------------------------------------------------------------ requests that come in many pieces

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():  # else the bytes are dropped
            super().data_received(data)
            self._after_reading()

    def handle_events(self) -> None:
        """Handle at most `EVENTS_PER_TURN` parsed events. The event loop's next turn goes on with the others."""
        if self._next_turn is not None:
            return
        self.conn.begin_turn()
        super().handle_events()
        if self.conn.turn_is_over:
            self._next_turn = self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._next_turn = None
        if not self.transport.is_closing():
            self.handle_events()
            self._after_reading()

    def _after_reading(self) -> None:
        """Close the connection if too many bytes follow a whole request. Start or stop the timers (`_watch`)."""
        request_is_whole = self.conn.their_state not in (h11.IDLE, h11.SEND_BODY)
        if request_is_whole and self._unparsed_bytes() > MAX_PIPELINED_BYTES:
            logger.info(
                "a client sent over %d bytes behind a request that is not answered yet: closed",
                MAX_PIPELINED_BYTES,
            )
            self.transport.abort()
        self._watch()

    # ------------------------------------------------------------------ requests that come slowly, or never

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()  # the timer that uvicorn itself has set
        self._watch()

    def _watch(self) -> None:
        """Start the timer for the rest of a request, or for the next request if none has begun to come.

        Stops the first timer once the whole request has come, or the connection is closing.
        """
        if self.transport.is_closing():
            self._stop_receiving()
            return
        waiting = self.conn.their_state is h11.IDLE
        if self.conn.their_state is h11.SEND_BODY or (waiting and self._unparsed_bytes()):
            if self._receiving is None:
                self._receiving = self.loop.call_later(self._receive_s, self._on_late)
            return
        self._stop_receiving()
        if waiting and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self._keep_alive_s, self.timeout_keep_alive_handler
            )

    def _stop_receiving(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _on_late(self) -> None:
        """Answer 408 if a request's head has not come in time. The app has a deadline of its own for a body."""
        self._receiving = None
        if self.conn.our_state is h11.IDLE:
            self._refuse(
                ApiError(
                    408, f"the request did not come within {self._receive_s:g} s", code="request_timeout"
                )
            )

    def send_400_response(self, msg: str) -> None:
        """Close the connection, because its bytes are not HTTP or exceed a bound of `BoundedParser`. If no answer
        has begun, send the error first."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(self.conn.refusal or ApiError(400, msg, code="invalid_http"))
        else:
            self._end_request()
            self.transport.close()

    def _refuse(self, refusal: ApiError) -> None:
        """Answer with an error, without the app, and close the connection."""
        self._end_request()
        log_refusal(refusal, refusal.status, refusal, client=self.client[0] if self.client else None)
        self.config.answers[refusal.status, refusal.code] += 1
        body = orjson.dumps(refusal.body())
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=refusal.status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _end_request(self) -> None:
        """Tell the app, if it has a request of this connection, that the client has left."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    # ------------------------------------------------------------------ answers that are not taken

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_sending()

    def _watch_sending(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        self._sending = self.loop.call_later(self.config.limits.send_s, self._on_unread, unsent)

    def _stop_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _on_unread(self, unsent: int) -> None:
        """Close the connection if the client took too little of its answer within `send_s`, or else watch on.

        Args:
            unsent: number of unsent bytes when this time began.
        """
        if unsent - self.transport.get_write_buffer_size() >= MUST_TAKE_BYTES:
            self._watch_sending()
        else:
            logger.info("a client took too little of its answer for %g s: closed", self.config.limits.send_s)
            self.transport.abort()


class Flow(FlowControl):
    """uvicorn's flow control, changed to go on reading while an answer is made.

    uvicorn itself stops reading when bytes wait behind a request. Then it notices only after the answer that the
    client has left. So if a client sends one byte more than its request and leaves, the answer is computed in vain.
    """

    def __init__(self, transport: asyncio.Transport, parser: BoundedParser) -> None:
        super().__init__(transport)
        self._parser = parser

    def pause_reading(self) -> None:
        """Stop reading if a request's body is still coming: then the body comes faster than the app takes it."""
        if self._parser.their_state is h11.SEND_BODY:
            super().pause_reading()


def counted_address(host: str) -> str | None:
    """Return the address under which a client's connections are counted; None for loopback and Unix sockets.

    An IPv6 network of 2^64 addresses (/64) counts as one address, since one machine can use all of them.
    """
    address = ip_address(host)
    address = getattr(address, "ipv4_mapped", None) or address
    if address is None or address.is_loopback:
        return None
    return str(address) if address.version == 4 else str(ipaddress.ip_network((address, 64), strict=False))
