"""The HTTP parser of a connection, with bounds on a request's head and on the pieces that a body comes in.

A body may come in chunks of one byte, and each chunk is an event of the HTTP parser. 256 KiB of such chunks come in
one read and take 0.2 s to parse, in which no other client is served. So the number of events in a turn of the event
loop is bounded, and so is the number of pieces in a body.

h11 bounds only a head that comes in several packets. One that comes whole is measured here, so that the same
request always gets the same answer.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import h11

from common.server.errors import ApiError

#: Most events parsed before the event loop serves other clients. They take about a millisecond.
EVENTS_PER_TURN = 32

#: A body may come in this many pieces (HTTP chunks or packets) of any size. With more pieces, the body must have
#: `MEAN_PIECE_BYTES` for each further piece. Packets of 536 bytes, the smallest in use, are large enough.
FREE_BODY_PIECES = 64
MEAN_PIECE_BYTES = 256


class BoundedParser(h11.Connection):
    """h11's HTTP parser for a server's connection. It bounds a request's head, the events that one turn of the
    event loop parses, and the pieces (HTTP chunks or packets) of a body.

    Args:
        max_head_bytes: bytes of a request's first line and headers at the most.

    Attributes:
        turn_is_over: whether parsing stopped because this turn of the event loop has parsed `EVENTS_PER_TURN`
            events.
        refusal: the error for a head that is too large, or for a body that came in too many pieces; else None.
    """

    def __init__(self, max_head_bytes: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self._max_head_bytes = max_head_bytes
        self.turn_is_over = False
        self.refusal: ApiError | None = None
        self._left_in_turn = EVENTS_PER_TURN
        self._pieces = 0
        self._body_bytes = 0
        self._is_chunked = False  # whether the answer is sent in HTTP chunks

    def begin_turn(self) -> None:
        """Begin a turn of the event loop, which may parse another `EVENTS_PER_TURN` events."""
        self.turn_is_over = False
        self._left_in_turn = EVENTS_PER_TURN

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Parse and return the next event. At the end of a turn, return `NEED_DATA`, as if no event were left.

        Raises:
            h11.RemoteProtocolError: the bytes are no HTTP, the head is too large, or the body has too many pieces.
        """
        if self._left_in_turn == 0:
            self.turn_is_over = True
            return h11.NEED_DATA
        self._left_in_turn -= 1
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
            return event if event.target.startswith(b"/") else in_origin_form(event)
        if isinstance(event, h11.Data):
            self._pieces += 1
            self._body_bytes += len(event.data)
            if self._pieces > FREE_BODY_PIECES + self._body_bytes // MEAN_PIECE_BYTES:
                says = (
                    f"{self._body_bytes} bytes of the body came in {self._pieces} pieces: send larger chunks"
                )
                raise self._refused(413, says, "too_many_pieces")
        return event

    def _head_too_large(self) -> h11.RemoteProtocolError:
        says = f"the request's first line and headers have more than {self._max_head_bytes} bytes"
        return self._refused(431, says, "head_too_large")

    def _refused(self, status: int, message: str, code: str) -> h11.RemoteProtocolError:
        """Keep the error for the client as `refusal`, and return the error to raise."""
        self.refusal = ApiError(status, message, code=code)
        return h11.RemoteProtocolError(message)

    def send(self, event: Any) -> Any:
        """Return the bytes of an event of the answer.

        If an answer begins before the request's whole body has come, it gets `Connection: close`: otherwise the
        rest of the body would have to be parsed to find the next request. A stream's bytes, which change no state
        of the parser, are framed here, without h11's dozen function calls for each token.
        """
        if type(event) is h11.Data and self._is_chunked and event.data and self.our_state is h11.SEND_BODY:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data)
        if type(event) is not h11.Response:
            return super().send(event)
        close = (b"connection", b"close")
        if self.their_state is h11.SEND_BODY and close not in event.headers:
            headers = [*event.headers, close]
            event = h11.Response(status_code=event.status_code, headers=headers, reason=event.reason)
        head: bytes = super().send(event)
        self._is_chunked = b"\r\ntransfer-encoding: chunked\r\n" in head.lower()
        return head


def head_bytes(request: h11.Request) -> int:
    """Return the bytes of a request's head, without spaces that its meaning does not need."""
    first_line = len(request.method) + len(request.target) + len(b"  HTTP/1.1\r\n")
    return first_line + sum(len(name) + len(value) + len(b": \r\n") for name, value in request.headers) + 2


def in_origin_form(request: h11.Request) -> h11.Request:
    """Rewrite `GET http://host/path`, which proxies send, to `GET /path` with that host.

    A request with another target is returned as it is.

    Raises:
        h11.RemoteProtocolError: the target is no URL.
    """
    try:
        url = urlsplit(request.target)
    except ValueError as error:
        raise h11.RemoteProtocolError(f"illegal request target: {error}") from None
    if url.scheme not in (b"http", b"https") or not url.netloc:
        return request
    host = url.netloc.rpartition(b"@")[2]  # the target's host counts, not the header's (RFC 9112, 3.2.2)
    return h11.Request(
        method=request.method,
        target=(url.path or b"/") + (b"?" + url.query if url.query else b""),
        headers=[(name, value) for name, value in request.headers if name != b"host"] + [(b"host", host)],
        http_version=request.http_version,
    )
