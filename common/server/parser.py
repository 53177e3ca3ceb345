"""Parses HTTP requests with bounded work: so many events in a turn of the event loop, so many pieces of a body.

A body may come in chunks of one byte, and each chunk is an event of the parser. 256 KiB of such chunks arrive in
one read and take 0.2 s to parse, in which no other client is served.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import h11

from common.server.errors import ApiError

#: Events parsed before the event loop serves others. They take about a millisecond.
EVENTS_PER_TURN = 32
#: Pieces of one body, its chunks or the network's packets, whatever their size; and the bytes that further pieces
#: must have on average. Packets of 536 bytes, the smallest in use, fit.
FREE_BODY_PIECES = 64
MEAN_PIECE_BYTES = 256


class BoundedParser(h11.Connection):
    """h11's parser of a server's connection, with bounds.

    Attributes:
        turn_is_over: whether events may be left that the next turn has to parse.
        refusal: the answer to a request that went beyond a bound; None if none did.
    """

    def __init__(self, max_incomplete_event_size: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size)
        self.turn_is_over = False
        self.refusal: ApiError | None = None
        self._left_in_turn = EVENTS_PER_TURN
        self._pieces = 0
        self._body_bytes = 0

    def begin_turn(self) -> None:
        """Allow another `EVENTS_PER_TURN` events."""
        self.turn_is_over = False
        self._left_in_turn = EVENTS_PER_TURN

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next event; at the end of a turn `NEED_DATA`, as if there were none.

        Raises:
            h11.RemoteProtocolError: the bytes are no HTTP, or the body has too many pieces.
        """
        if self._left_in_turn == 0:
            self.turn_is_over = True
            return h11.NEED_DATA
        self._left_in_turn -= 1
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._pieces = self._body_bytes = 0
            return event if event.target.startswith(b"/") else in_origin_form(event)
        if isinstance(event, h11.Data):
            self._pieces += 1
            self._body_bytes += len(event.data)
            if self._pieces > FREE_BODY_PIECES + self._body_bytes // MEAN_PIECE_BYTES:
                self.refusal = ApiError(
                    413,
                    f"{self._body_bytes} bytes of the body came in {self._pieces} pieces: send larger chunks",
                    code="too_many_pieces",
                )
                raise h11.RemoteProtocolError(self.refusal.message)
        return event

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        """Serialize an event. An answer that comes before the whole request says that it is the connection's last:
        to find the next request, the rest of this one would have to be parsed."""
        close = (b"connection", b"close")
        if (
            isinstance(event, h11.Response)
            and self.their_state is h11.SEND_BODY
            and close not in event.headers
        ):
            event = h11.Response(
                status_code=event.status_code, headers=[*event.headers, close], reason=event.reason
            )
        return super().send_with_data_passthrough(event)


def in_origin_form(request: h11.Request) -> h11.Request:
    """Rewrite `GET http://host/path`, which proxies send, to `GET /path` with that host; other targets stay.

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
