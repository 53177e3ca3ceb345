"""Server-sent events, from chunks of bytes.

httpx's `iter_lines` also ends lines at U+2028 and the like, which JSON may have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class EventParser:
    """Parses server-sent events from chunks of bytes. A chunk may end in the middle of an event."""

    def __init__(self) -> None:
        self._rest = b""
        self._name = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[tuple[bytes, bytes]]:
        """Return the name (b"" if it has none) and the data of each event with data that this chunk completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        events = []
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if not line:
                if self._data:
                    events.append((self._name, b"\n".join(self._data)))
                self._name, self._data = b"", []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif line.startswith(b"event:"):
                self._name = line[6:].strip()
        return events


def data_of(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the data of each event in a stream of OpenAI's API, except for the last, `[DONE]`."""
    parser = EventParser()
    for chunk in chunks:
        yield from (data for _, data in parser.feed(chunk) if data != b"[DONE]")
