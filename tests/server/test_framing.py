"""`BoundedParser` bounds a request's head, and writes the chunks of a stream byte for byte as h11 does."""

from __future__ import annotations

import h11
import pytest

from common.server.http.connections import BoundedParser

HEAD = b" HTTP/%b\r\nHost: here\r\n\r\n"


def written(
    parser: h11.Connection, request: bytes, headers: list[tuple[str, str]], data: list[bytes]
) -> bytes:
    """Return the bytes that a parser writes for an answer with these headers and pieces of data."""
    parser.receive_data(request)
    while parser.next_event() is not h11.NEED_DATA and parser.their_state is h11.SEND_BODY:
        pass
    answer = [h11.Response(status_code=200, headers=headers), *(h11.Data(data=piece) for piece in data)]
    return b"".join(parser.send(event) for event in [*answer, h11.EndOfMessage()])


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("data", [[], [b""], [b"a token", b"", b"x" * 300, b"y"]])
def test_chunks_are_framed_as_h11_frames_them(version: bytes, data: list[bytes]) -> None:
    request = b"POST /" + HEAD % version
    parsers = BoundedParser(1 << 16), h11.Connection(h11.SERVER)
    streamed, expected = (written(parser, request, [("a", "b")], data) for parser in parsers)
    assert streamed == expected
    assert (b"chunked" in streamed) == (version == b"1.1")


def test_an_answer_of_a_known_length_after_a_stream_is_not_framed() -> None:
    parser = BoundedParser(1 << 16)
    request = b"GET /" + HEAD % b"1.1"
    assert written(parser, request, [], [b"a token"]).endswith(b"7\r\na token\r\n0\r\n\r\n")
    parser.start_next_cycle()
    assert written(parser, request, [("content-length", "7")], [b"a token"]).endswith(b"\r\n\r\na token")


def test_data_after_the_end_of_a_stream_is_an_error() -> None:
    parser = BoundedParser(1 << 16)
    written(parser, b"GET /" + HEAD % b"1.1", [], [b"a token"])
    with pytest.raises(h11.LocalProtocolError):
        parser.send(h11.Data(data=b"another"))


@pytest.mark.parametrize("packet_bytes", [1 << 20, 1400, 1])
@pytest.mark.parametrize("excess", [0, 1])
def test_a_heads_size_counts_and_not_its_packets(packet_bytes: int, excess: int) -> None:
    limit = 2000
    head = b"GET /health HTTP/1.1\r\nHost: here\r\nX-Long: %b\r\n\r\n"
    head %= b"x" * (limit + excess - len(head % b""))
    parser = BoundedParser(limit)

    def last_event() -> object:
        event: object = None
        for begin in range(0, len(head), packet_bytes):
            parser.receive_data(head[begin : begin + packet_bytes])
            event = parser.next_event()
        return event

    if excess == 0:
        assert isinstance(last_event(), h11.Request)
    else:
        with pytest.raises(h11.RemoteProtocolError):
            last_event()
        assert parser.refusal is not None
        assert (parser.refusal.status, parser.refusal.code) == (431, "head_too_large")
