"""Bytes that clients have not read yet, counted for each client and for all together.

```text
stream       engine ─> events ─> Backlog ─> HTTP server (64 KiB) ─> kernel ─> client
JSON answer  engine ───────────────────────> HTTP server (all) ───> kernel ─> client
```

A client that reads more slowly than its answer is made leaves bytes behind. The kernel's buffers take the first of
them, the HTTP server's the next; a stream's others are in its backlog, a JSON answer is in the HTTP server whole.
The engine does not wait for slow readers, so their memory needs a bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

#: The most that is handed on at once. A client's progress is seen from one piece to the next.
PIECE_BYTES = 16 * 1024
#: A client that has left less is not given up for the others: a prompt reader may have as much for a moment.
FLOOR_BYTES = 64 * 1024


class SlowReaderError(Exception):
    """A client that does not take its answer; the message says how many bytes it left."""


class Unread:
    """One client's part of the bytes that clients have not read.

    Args:
        backlogs: all clients' bytes.
        give_up: ends the answer; called at most once, and the client's bytes have left the total by then.

    Attributes:
        bytes: how many this client has not read.
    """

    def __init__(self, backlogs: Backlogs, give_up: Callable[[SlowReaderError], None]) -> None:
        self.bytes = 0
        self._backlogs = backlogs
        self._give_up = give_up
        backlogs.unread.add(self)

    def add(self, count: int) -> None:
        """Add bytes, or take some away if `count` is negative. May give up clients, this one included."""
        if self not in self._backlogs.unread:  # given up
            return
        self.bytes += count
        self._backlogs.bytes += count
        if count > 0:
            self._backlogs.relieve()

    def give_up(self, reason: str) -> None:
        """End the answer: the client has left too much of it."""
        left = self.bytes
        self.forget()
        self._give_up(SlowReaderError(f"the client left {left} bytes unread, {reason}"))

    def forget(self) -> None:
        """Take the client's bytes out of the total, for good."""
        if self in self._backlogs.unread:
            self._backlogs.unread.remove(self)
            self._backlogs.bytes -= self.bytes


class Backlog:
    """One stream's bytes, made and not taken. A context manager: at its end the bytes that are left are forgotten.

    Attributes:
        failed: raises the error that ended the stream: its client is too slow, or an event could not be made.
    """

    def __init__(self, backlogs: Backlogs) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._limit_bytes = backlogs.limit_bytes
        self._unread = Unread(backlogs, self.fail)
        self._made = bytearray()
        self._ended = False
        self._news = asyncio.Event()
        self._empty = asyncio.Event()

    @property
    def unread_bytes(self) -> int:
        """How many bytes were made and not taken."""
        return self._unread.bytes

    def __enter__(self) -> Backlog:
        return self

    def __exit__(self, *_: object) -> None:
        self._unread.forget()
        self.failed.cancel()

    def put(self, chunk: bytes) -> None:
        """Add bytes of the stream. A stream that failed takes none."""
        if self.failed.done():
            return
        self._made += chunk
        self._news.set()
        self._unread.add(len(chunk))
        if self.unread_bytes > self._limit_bytes and not self.failed.done():
            self._unread.give_up("over --max-unread-bytes")

    def end(self) -> None:
        """Say that no more will be made."""
        self._ended = True
        self._news.set()

    def fail(self, error: Exception) -> None:
        """End the stream with an error. Bytes that its client has not taken are freed."""
        if not self.failed.done():
            self.failed.set_exception(error)
            self._unread.forget()
            self._made.clear()

    @property
    def ended(self) -> bool:
        """Whether all of the stream has been made."""
        return self._ended

    async def next_piece(self, limit: int | None = PIECE_BYTES) -> bytes:
        """Return the next bytes once there are some; none at the stream's end. Call `taken` when they are sent.

        Args:
            limit: bytes at the most; None: everything that was made so far, which is whole events.
        """
        while not self._made and not self._ended:
            self._news.clear()
            await self._news.wait()
        piece = bytes(self._made[:limit])
        del self._made[:limit]
        return piece

    def taken(self, count: int) -> None:
        """Count bytes as taken by the client."""
        self._unread.add(-count)
        if not self.unread_bytes:
            self._empty.set()

    async def all_taken(self) -> None:
        """Wait until the client has taken all bytes made so far."""
        self._empty.clear()
        if self.unread_bytes:
            await self._empty.wait()


class Backlogs:
    """All clients' bytes, made and not read.

    Args:
        limit_bytes: of one stream; a stream with more is given up.
        total_limit_bytes: of all clients together. Beyond it, the client with the most is given up, unless that has
            less than `FLOOR_BYTES`.
        send_timeout_s: for how long the HTTP server may wait until it takes a piece. It holds 64 KiB of a
            connection's bytes, and takes more when 16 KiB are left.

    Attributes:
        bytes: how many there are.
        unread: the clients.
    """

    def __init__(
        self,
        limit_bytes: int = 4 * 2**20,
        total_limit_bytes: int = 64 * 2**20,
        send_timeout_s: float = 60.0,
    ) -> None:
        self.send_timeout_s = send_timeout_s
        self.limit_bytes = limit_bytes
        self._total_limit_bytes = total_limit_bytes
        self.bytes = 0
        self.unread: set[Unread] = set()

    def open(self) -> Backlog:
        """Return the backlog of a new stream."""
        return Backlog(self)

    def relieve(self) -> None:
        """Give up clients until the total is within its bound, the one with the most bytes first."""
        while self.bytes > self._total_limit_bytes:
            most = max(self.unread, key=lambda each: each.bytes)
            if most.bytes < FLOOR_BYTES:
                return
            most.give_up("the most of all, over --max-total-unread-bytes")
