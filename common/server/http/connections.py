"""Connections to clients: bounds on their number and time, and the answer to bytes that are not HTTP.

```text
opened ──> waits for a request ──> its head comes ──> its body comes ──> answered ──> waits again
           keep-alive timeout      body timeout       body timeout,      a client that takes too
           closed                  408, closed        see `bodies`       little of it: closed
```

uvicorn itself has a timeout for the wait between two requests, and no others.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import time
from collections import Counter
from typing import Any

import h11
import orjson
import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from common.errors import ShuttingDownError
from common.server.errors import ApiError, from_exception, unavailable
from common.server.http.middleware import OPEN_PATHS, Guard, ip_address, without_root
from common.server.http.sockets import SPARE_CONNECTIONS
from common.server.logs import log_refusal
from common.server.options import ServerOptions

logger = logging.getLogger(__name__)

#: Timeouts of a connection beyond the bound on their number, in seconds: for a request's head, and between
#: requests.
SPARE_TIMEOUT_S = 5.0
#: If a client takes fewer bytes than this of its answer within `--send-timeout`, its connection is closed. The time
#: runs while over 64 KiB wait for the client, until 16 KiB are left.
MUST_TAKE_BYTES = 48 * 1024
#: Bytes of a request's head at the most.
MAX_HEAD_BYTES = 16 * 1024

#: A body may come in this many pieces (HTTP chunks or packets) of any size. With more pieces, the body must have
#: `MEAN_PIECE_BYTES` for each further piece. Packets of 536 bytes, the smallest in use, are large enough.
FREE_BODY_PIECES = 64
MEAN_PIECE_BYTES = 512

#: Bytes of a body after which its connection is closed. The app answers 413 long before. The connection then stays
#: open and drops the body's rest, because most clients write their whole request before they read.
MOST_DROPPED_BYTES = 16 * 2**20

#: Seconds between two warnings about too many connections, at least.
WARN_EVERY_S = 10.0
#: Most seconds that a client may go on sending after its request was refused here.
LINGER_S = 2.0


class Config(uvicorn.Config):
    """The HTTP server's settings.

    Args:
        answers: counts answers by status and error code, also those that connections give without the app.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions, answers: Counter[tuple[int, str]]) -> None:
        # uvicorn wants whole seconds, but passes them to the event loop, which takes any number.
        keep_alive_s: Any = options.keep_alive_timeout
        super().__init__(
            app,
            http=Connection,
            timeout_keep_alive=keep_alive_s,
            loop="asyncio",  # even if uvloop is installed, as by Ray
            lifespan="on",
            ws="none",
            log_config=None,
            access_log=options.log_level == "debug",
            **options.proxy_settings(),
            ssl_certfile=options.ssl_certfile,
            ssl_keyfile=options.ssl_keyfile,
        )
        self.options = options
        self.answers = answers
        self.addresses: Counter[str] = Counter()  # number of connections of each address
        self._last_warning_s = -WARN_EVERY_S

    def excess(self, connections: int, address: str | None) -> int:
        """Return by how many of the open connections the bound on all, or that on one address, is exceeded.

        The larger excess is returned; 0 or less: there is none. Logs a warning if there is, at most one in
        `WARN_EVERY_S` seconds: a client may open thousands of connections.
        """
        most = self.options.max_connections
        most_of_one = self.options.max_connections_per_address or most // 2
        excess = connections - most
        says = f"{most} connections are open, the most that --max-connections allows"
        if address is not None and self.addresses[address] - most_of_one > excess:
            excess = self.addresses[address] - most_of_one
            says = f"{most_of_one} connections of {address} are open, the most that "
            says += "--max-connections-per-address allows"
        if excess > 0 and time.monotonic() - self._last_warning_s >= WARN_EVERY_S:
            self._last_warning_s = time.monotonic()
            logger.warning("%s: more are refused", says)
        return excess


class BoundedParser(h11.Connection):
    """h11's HTTP parser for a server's connection, with bounds on a request's head and on the pieces of its body.

    A body may come in chunks of one byte, and each chunk is an event of the parser: 256 KiB of them come in one
    read and take 0.2 s to parse, in which no other client is served.

    h11 bounds only a head that comes in several packets. One that comes whole is measured here, so that the same
    request always gets the same answer.
    """

    def __init__(self, max_head_bytes: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self._max_head_bytes = max_head_bytes
        self.refusal: ApiError | None = None  # for a head that is too large, or a body in too many pieces
        self._pieces = 0
        self._body_bytes = 0
        self._is_chunked = False  # whether the answer is sent in HTTP chunks

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Parse and return the next event. Raises h11.RemoteProtocolError for bytes that are no HTTP or exceed a
        bound."""
        in_head = self.their_state is h11.IDLE
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if in_head and error.error_status_hint == 431:  # request header fields too large
                raise self._head_too_large() from None
            raise
        if isinstance(event, h11.Request):
            if head_bytes(event) > self._max_head_bytes:
                raise self._head_too_large()
            self._pieces = self._body_bytes = 0
        elif isinstance(event, h11.Data):
            self._count_piece(len(event.data))
        return event

    def _count_piece(self, size: int) -> None:
        self._pieces += 1
        self._body_bytes += size
        if self._pieces > FREE_BODY_PIECES + self._body_bytes // MEAN_PIECE_BYTES:
            says = f"{self._body_bytes} bytes of the body came in {self._pieces} pieces: send larger chunks"
            raise self._refused(413, says, "too_many_pieces")
        if self._body_bytes > MOST_DROPPED_BYTES:
            raise h11.RemoteProtocolError("the rest of the body is too large to be dropped")

    def _head_too_large(self) -> h11.RemoteProtocolError:
        says = f"the request's first line and headers have more than {self._max_head_bytes} bytes"
        return self._refused(431, says, "head_too_large")

    def _refused(self, status: int, message: str, code: str) -> h11.RemoteProtocolError:
        """Keep the error for the client as `refusal`, and return the error to raise."""
        self.refusal = ApiError(status, message, code=code)
        return h11.RemoteProtocolError(message)

    def send(self, event: Any) -> Any:
        """Return the bytes of an event of the answer. A stream's bytes, which change no state of the parser, are
        framed here, without h11's dozen function calls for each token."""
        if type(event) is h11.Data and self._is_chunked and event.data and self.our_state is h11.SEND_BODY:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data)
        sent = super().send(event)
        if type(event) is h11.Response:
            self._is_chunked = b"\r\ntransfer-encoding: chunked\r\n" in sent.lower()
        return sent


def head_bytes(request: h11.Request) -> int:
    """Return the bytes of a request's head, without spaces that its meaning does not need."""
    first_line = len(request.method) + len(request.target) + len(b"  HTTP/1.1\r\n")
    return first_line + sum(len(name) + len(value) + len(b": \r\n") for name, value in request.headers) + 2


class TooMany(Guard):
    """Refuses requests on connections beyond the bound on their number."""

    def __init__(self, app: ASGIApp, config: Config) -> None:
        super().__init__(app)
        self._config = config

    def refusal(self, scope: Scope) -> ApiError | None:
        if without_root(scope["path"], self._config.options.root_path) in OPEN_PATHS:
            return None
        refusal = unavailable(
            "too many connections are open, of all clients or of one address (the server's options "
            "--max-connections and --max-connections-per-address); try again shortly",
            code="too_many_connections",
            retry_after_s=1,
        )
        refusal.headers["Connection"] = "close"
        self._config.answers[refusal.status, refusal.code] += 1
        return refusal


class Connection(H11Protocol):
    """uvicorn's connection, with limits on connections, and on the time of a request and of an answer."""

    config: Config

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn: BoundedParser = BoundedParser(config.h11_max_incomplete_event_size or MAX_HEAD_BYTES)
        self._address: str | None = None
        self._receive_s = config.options.body_timeout
        self._receiving: asyncio.TimerHandle | None = None  # ends a request that does not come whole
        self._sending: asyncio.TimerHandle | None = None  # ends an answer that is not taken
        self._is_refused = False  # the client's bytes are dropped until the connection is closed

    # ------------------------------------------------------------------ opened and closed

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._address = None if self.client is None else counted_address(self.client[0])
        if self._address is not None:
            self.config.addresses[self._address] += 1
        excess = self.config.excess(len(self.connections), self._address)
        if excess > SPARE_CONNECTIONS:
            transport.abort()
            return
        if excess > 0:
            self.app = TooMany(self.app, self.config)
            self._receive_s = SPARE_TIMEOUT_S
            self.timeout_keep_alive = SPARE_TIMEOUT_S  # type: ignore[assignment]  # see `Config`
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._address is not None:
            self.config.addresses[self._address] -= 1
            self.config.addresses += Counter()  # drops addresses without a connection
        self._unset_keepalive_if_required()
        self._stop_receiving()
        self._stop_sending()

    # ------------------------------------------------------------------ requests that come slowly, or never

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:
            super().data_received(data)
            self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """Run a timer while a request comes, and another while none has begun to come."""
        state, is_closing = self.conn.their_state, self.transport.is_closing()
        begun = state is h11.SEND_BODY or (state is h11.IDLE and self.conn.trailing_data[0])
        if is_closing or not begun:
            self._stop_receiving()
        elif self._receiving is None:
            self._receiving = self.loop.call_later(self._receive_s, self._on_late)
        if state is h11.IDLE and not begun and not is_closing and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _stop_receiving(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _on_late(self) -> None:
        """Answer 408 if a request's head has not come in time, and close the connection if the rest of a body has
        not come after its answer. While the app reads a body, it has a deadline of its own."""
        self._receiving = None
        if self.conn.our_state is h11.IDLE:
            late = f"the request did not come within {self._receive_s:g} s"
            self._refuse(ApiError(408, late, code="request_timeout"))
        elif self.conn.our_state is h11.DONE:
            self.transport.close()

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
        # A socket that is closed while bytes of the client wait in it resets the connection, and the client may
        # lose the answer. So the client's bytes are dropped until it closes the connection.
        self._is_refused = True
        self._stop_receiving()
        self.flow.resume_reading()
        # TLS cannot close one direction only: there, the client finds the end of the answer by its length.
        if self.transport.can_write_eof():
            with contextlib.suppress(OSError):  # reset by the client: `connection_lost` follows
                self.transport.write_eof()
        self.loop.call_later(min(LINGER_S, self._receive_s), self.transport.close)

    def shutdown(self) -> None:
        """Close the connection when its answer is sent, because the server shuts down. A request whose body has not
        come whole is refused: nobody waits for the rest."""
        if self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.SEND_RESPONSE:
            self._refuse(from_exception(ShuttingDownError("the server is shutting down")))
        else:
            super().shutdown()

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
        self._sending = self.loop.call_later(self.config.options.send_timeout, self._on_unread, unsent)

    def _stop_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _on_unread(self, unsent: int) -> None:
        """Close the connection if the client took too little of its answer in time, or else watch on. `unsent` is
        the number of unsent bytes when the time began."""
        if unsent - self.transport.get_write_buffer_size() >= MUST_TAKE_BYTES:
            self._watch_sending()
        else:
            late_s = self.config.options.send_timeout
            logger.info("a client took too little of its answer for %g s: closed", late_s)
            self.transport.abort()


def counted_address(host: str) -> str | None:
    """Return the address under which a client's connections are counted; None for loopback and Unix sockets.

    An IPv6 network of 2^64 addresses (/64) counts as one address, since one machine can use all of them.
    """
    address = ip_address(host)
    address = getattr(address, "ipv4_mapped", None) or address
    if address is None or address.is_loopback:
        return None
    return str(address) if address.version == 4 else str(ipaddress.ip_network((address, 64), strict=False))
