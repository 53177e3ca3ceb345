"""What was made for clients and they have not taken: counted in bytes, for each stream and for all together.

```text
engine ─> events ─> Backlog ─> HTTP server (64 KiB) ─> kernel ─> client
                    bounded    waits for the client
```

A client that reads more slowly than its answer is made leaves bytes behind. The kernel's buffers take the first of
them, the HTTP server's the next; the rest is here. Nobody waits for a slow reader, so it must end somewhere.
"""

from __future__ import annotations

import asyncio

#: The most that is handed on at once. A client's progress is seen from one piece to the next.
PIECE_BYTES = 16 * 1024


class SlowReaderError(Exception):
    """A client that does not take its answer; the message says what it left."""


class Backlog:
    """One stream's bytes, made and not taken. A context manager: what is left at its end is forgotten.

    Attributes:
        bytes: how many there are.
        failed: raises what ended the stream, should that happen: its client is too slow, or it could not be made.
    """

    def __init__(self, all_of_them: Backlogs) -> None:
        self.bytes = 0
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._all = all_of_them
        self._made = bytearray()
        self._ended = False
        self._news = asyncio.Event()
        self._empty = asyncio.Event()

    def __enter__(self) -> Backlog:
        self._all.open_backlogs.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._all.open_backlogs.discard(self)
        self._all.bytes -= self.bytes
        self.failed.cancel()

    def put(self, chunk: bytes) -> None:
        """More was made."""
        self._made += chunk
        self._news.set()
        self._count(len(chunk))

    def end(self) -> None:
        """No more will be made."""
        self._ended = True
        self._news.set()

    def fail(self, error: Exception) -> None:
        """The stream ends here, whatever its client has taken."""
        if not self.failed.done():
            self.failed.set_exception(error)

    async def next_piece(self) -> bytes:
        """What comes next, once there is something; nothing: the stream has ended. Say `taken` when it is gone."""
        if not self._made and not self._ended:
            self._news.clear()
            await self._news.wait()
        piece = bytes(self._made[:PIECE_BYTES])
        del self._made[:PIECE_BYTES]
        return piece

    def taken(self, count: int) -> None:
        self._count(-count)
        if not self.bytes:
            self._empty.set()

    async def all_taken(self) -> None:
        """Until nothing is left of what was made so far."""
        self._empty.clear()
        if self.bytes:
            await self._empty.wait()

    def _count(self, more: int) -> None:
        self.bytes += more
        self._all.bytes += more
        if more > 0:
            self._all.relieve(self)


class Backlogs:
    """All streams' bytes, made and not taken.

    Args:
        limit_bytes: for one stream: beyond it, that stream is given up.
        total_limit_bytes: for all together: beyond it, the one with the most is given up.
        send_timeout_s: for how long the HTTP server may wait until it takes a piece: it holds 64 KiB of a
            connection's bytes, and takes more when 16 are left.

    Attributes:
        bytes: how many there are.
        open_backlogs: whose they are.
    """

    def __init__(
        self,
        limit_bytes: int = 4 * 2**20,
        total_limit_bytes: int = 64 * 2**20,
        send_timeout_s: float = 60.0,
    ) -> None:
        self.send_timeout_s = send_timeout_s
        self._limit_bytes = limit_bytes
        self._total_limit_bytes = total_limit_bytes
        self.bytes = 0
        self.open_backlogs: set[Backlog] = set()

    def open(self) -> Backlog:
        """For a new stream."""
        return Backlog(self)

    def relieve(self, grown: Backlog) -> None:
        """Give up a stream if there is too much."""
        if grown.bytes > self._limit_bytes:
            grown.fail(
                SlowReaderError(f"the client left {grown.bytes} bytes unread, over --max-unread-bytes")
            )
        elif self.bytes > self._total_limit_bytes:
            living = (each for each in self.open_backlogs if not each.failed.done())
            most = max(living, key=lambda each: each.bytes, default=None)
            if most is not None:
                most.fail(
                    SlowReaderError(
                        f"the client left {most.bytes} bytes unread, the most of all, over --max-total-unread-bytes"
                    )
                )
