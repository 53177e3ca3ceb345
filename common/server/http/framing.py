"""The HTTP parser of a connection, with bounds on a request's head and on the pieces that a body comes in.

A body may come in chunks of one byte, and each chunk is an event of the HTTP parser. 256 KiB of such chunks come in
one read and take 0.2 s to parse, in which no other client is served. So the number of pieces in a body is bounded.

h11 bounds only a head that comes in several packets. One that comes whole is measured here, so that the same
request always gets the same answer.
"""

from __future__ import annotations

from typing import Any

import h11

from common.server.errors import ApiError

#: A body may come in this many pieces (HTTP chunks or packets) of any size. With more pieces, the body must have
#: `MEAN_PIECE_BYTES` for each further piece. Packets of 536 bytes, the smallest in use, are large enough.
FREE_BODY_PIECES = 64
MEAN_PIECE_BYTES = 512

#: Bytes of a body after which its connection is closed. The app answers 413 long before. The connection then stays
#: open and drops the body's rest, because most clients write their whole request before they read.
MOST_DROPPED_BYTES = 16 * 2**20


class BoundedParser(h11.Connection):
    """h11's HTTP parser for a server's connection, with bounds on a request's head and body."""

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
