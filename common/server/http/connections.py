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
import ipaddress
import itertools
import logging
import sys
from collections import Counter
from typing import Any

import h11
import orjson
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from common.errors import ShuttingDownError
from common.server.errors import ApiError, from_exception
from common.server.http.middleware import TOO_MANY, ip_address
from common.server.http.sockets import SPARE_CONNECTIONS
from common.server.logs import log_refusal
from common.server.options import ServerOptions

logger = logging.getLogger(__name__)

#: If a client takes fewer bytes than this of its answer within `--send-timeout`, its connection is closed. The time
#: runs while over 64 KiB wait for the client, until 16 KiB are left.
MUST_TAKE_BYTES = 48 * 1024
#: Bytes of a request's target and headers at the most.
MAX_HEAD_BYTES = 16 * 1024

#: A body may come in this many pieces (HTTP chunks or packets) of any size. With more pieces, the body must have
#: `MEAN_PIECE_BYTES` for each further piece. Packets of 536 bytes, the smallest in use, are large enough.
FREE_BODY_PIECES = 64
MEAN_PIECE_BYTES = 512

#: Code and message of the errors for bytes that exceed a bound, by the status that the parser's error has.
BEYOND = {
    413: ("too_many_pieces", "the body came in too many pieces for its bytes: send larger chunks"),
    431: ("head_too_large", f"the request's first line and headers have more than {MAX_HEAD_BYTES} bytes"),
}


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


class BoundedParser(h11.Connection):
    """h11's HTTP parser for a server's connection, with bounds on a request's head and on the pieces of its body.

    A body may come in chunks of one byte, and each chunk is an event of the parser: 256 KiB of them come in one
    read and take 0.2 s to parse, in which no other client is served.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self._pieces = 0
        self._body_bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Parse and return the next event. Raises h11.RemoteProtocolError for bytes that are no HTTP or exceed a
        bound."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._pieces = self._body_bytes = 0
            # h11 measures only a head that comes in several packets.
            if len(event.target) + sum(map(len, itertools.chain(*event.headers))) > MAX_HEAD_BYTES:
                raise h11.RemoteProtocolError("head too large", error_status_hint=431)
        elif isinstance(event, h11.Data):
            self._pieces += 1
            self._body_bytes += len(event.data)
            if self._pieces > FREE_BODY_PIECES + self._body_bytes // MEAN_PIECE_BYTES:
                raise h11.RemoteProtocolError("too many pieces", error_status_hint=413)
        return event


class Connection(H11Protocol):
    """uvicorn's connection, with limits on connections, and on the time of a request and of an answer."""

    config: Config

    def __init__(self, config: Config, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        self.conn = BoundedParser()
        self._address: str | None = None
        self._receiving: asyncio.TimerHandle | None = None  # ends a request that does not come whole
        self._sending: asyncio.TimerHandle | None = None  # ends an answer that is not taken

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._address = None if self.client is None else counted_address(self.client[0])
        options = self.config.options
        excess = len(self.connections) - options.max_connections
        if self._address is not None:
            self.config.addresses[self._address] += 1
            most = options.max_connections_per_address or options.max_connections // 2
            excess = max(excess, self.config.addresses[self._address] - most)
        if excess > SPARE_CONNECTIONS:
            transport.abort()
            return
        if excess > 0:
            self.app_state = {**self.app_state, TOO_MANY: True}  # copied into the state of each request
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._address is not None:
            self.config.addresses[self._address] -= 1
            self.config.addresses += Counter()  # drops addresses without a connection
        self._unset_keepalive_if_required()
        for timer in filter(None, (self._receiving, self._sending)):
            timer.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """Run a timer while a request comes, and another while none has begun to come."""
        state, is_closing = self.conn.their_state, self.transport.is_closing()
        begun = state is h11.SEND_BODY or (state is h11.IDLE and self.conn.trailing_data[0])
        if self._receiving is not None and (is_closing or not begun):
            self._receiving.cancel()
            self._receiving = None
        elif self._receiving is None and begun and not is_closing:
            self._receiving = self.loop.call_later(self.config.options.body_timeout, self._on_late)
        if state is h11.IDLE and not begun and not is_closing and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _on_late(self) -> None:
        """Answer 408 if a request's head has not come in time, and close the connection if the rest of a body has
        not come after its answer. While the app reads a body, it has a deadline of its own."""
        self._receiving = None
        if self.conn.our_state is h11.IDLE:
            late = f"the request did not come within {self.config.options.body_timeout:g} s"
            self._refuse(ApiError(408, late, code="request_timeout"))
        elif self.conn.our_state is h11.DONE:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Close the connection: the parser has raised an error. If no answer has begun, send the error first."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = sys.exception()
            status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
            code, says = BEYOND.get(status, ("invalid_http", msg))
            self._refuse(ApiError(status if status in BEYOND else 400, says, code=code))
        else:
            self.transport.close()

    def _refuse(self, refusal: ApiError) -> None:
        """Answer with an error, without the app, and close the connection."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the app's own answer is not sent any more
            self.cycle.message_event.set()
        log_refusal(refusal, refusal.status, refusal, client=self.client[0] if self.client else None)
        self.config.answers[refusal.status, refusal.code] += 1
        body = orjson.dumps(refusal.body())
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        head = h11.Response(status_code=refusal.status, headers=headers)
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def shutdown(self) -> None:
        """Close the connection when its answer is sent, because the server shuts down. A request whose body has not
        come whole is refused: nobody waits for the rest."""
        if self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.SEND_RESPONSE:
            self._refuse(from_exception(ShuttingDownError("the server is shutting down")))
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._sending is not None:
            self._sending.cancel()

    def _watch_sending(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        self._sending = self.loop.call_later(self.config.options.send_timeout, self._on_unread, unsent)

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
