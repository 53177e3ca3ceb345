"""The bytes of answers that clients have not read, counted for each client and for all together.

```text
stream       engine ─> events ─> Backlog ─> HTTP server (64 KiB) ─> kernel ─> client
JSON answer  engine ───────────────────────> HTTP server (all) ───> kernel ─> client
```

If a client reads more slowly than its answer is produced, unread bytes fill the kernel's buffers first, and then
the HTTP server's. The rest of a stream is in its backlog. A JSON answer is handed to the HTTP server whole. The
engine does not wait for slow readers, so the memory for unread bytes needs a bound.

Counted are the bytes in backlogs, and the bytes of complete answers in the HTTP server. Bytes in the kernel are not
counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from common.hosting.async_engine import WakeUp

#: Most bytes of a stream handed to the HTTP server at once, unless a front of a cluster passes the stream on. After
#: each of these pieces, a client's progress is noticed.
PIECE_BYTES = 16 * 1024
#: An answer with fewer unread bytes than this is never ended to lower the total: even a quick reader may leave that
#: many unread.
FLOOR_BYTES = 64 * 1024


class SlowReaderError(Exception):
    """Ends an answer whose client reads too slowly. The message says why."""


class Backlogs:
    """Counts the unread bytes of all clients, and ends answers if a bound is exceeded.

    Args:
        limit_bytes: bound for one stream; a stream with more unread bytes is ended.
        total_limit_bytes: bound for all clients together. If it is exceeded, `relieve` ends answers.
        send_timeout_s: seconds within which the HTTP server must take one piece of a stream (`PIECE_BYTES`). Once
            it holds over 64 KiB of a connection's bytes, it takes no more until 16 KiB are left.

    Attributes:
        bytes: number of unread bytes of all clients.
        unread: the `Unread` of each open stream, and of each complete answer that is taken slowly.
    """

    def __init__(
        self, limit_bytes: int = 4 * 2**20, total_limit_bytes: int = 64 * 2**20, send_timeout_s: float = 60.0
    ) -> None:
        self.send_timeout_s = send_timeout_s
        self.limit_bytes = limit_bytes
        self._total_limit_bytes = total_limit_bytes
        self.bytes = 0
        self.unread: set[Unread] = set()

    def open(self) -> Backlog:
        """Return the backlog of a new stream."""
        return Backlog(self)

    def too_slow(self) -> SlowReaderError:
        return SlowReaderError(f"the client took too little for {self.send_timeout_s:g} s")

    def relieve(self) -> None:
        """End answers until the total of unread bytes is within its limit.

        The answer with the most unread bytes is ended first. Stops early if each answer left has fewer than
        `FLOOR_BYTES` unread bytes.
        """
        while self.bytes > self._total_limit_bytes:
            most = max(self.unread, key=lambda each: each.bytes)
            if most.bytes < FLOOR_BYTES:
                return
            most.give_up("the most of all, over --max-total-unread-bytes")


class Unread:
    """Counts the unread bytes of one answer, which are part of the total in `Backlogs`.

    Args:
        backlogs: counts the unread bytes of all clients.
        give_up: ends the answer. Called at most once, with an error that says why, after the answer's bytes were
            taken out of the total.

    Attributes:
        bytes: number of the answer's unread bytes.
    """

    def __init__(self, backlogs: Backlogs, give_up: Callable[[SlowReaderError], None]) -> None:
        self.bytes = 0
        self._backlogs = backlogs
        self._give_up = give_up
        backlogs.unread.add(self)

    def add(self, count: int) -> None:
        """Change the number of unread bytes by `count`, which may be negative. Does nothing after `forget`.

        If `count` is positive and the total then exceeds its limit, answers are ended, perhaps this one.
        """
        if self not in self._backlogs.unread:  # `forget` was called
            return
        self.bytes += count
        self._backlogs.bytes += count
        if count > 0:
            self._backlogs.relieve()

    def give_up(self, reason: str) -> None:
        """End the answer, because the client has left too many bytes unread."""
        left = self.bytes
        self.forget()
        self._give_up(SlowReaderError(f"the client left {left} bytes unread, {reason}"))

    def forget(self) -> None:
        """Take the answer's bytes out of the total, for good: later calls of `add` do nothing."""
        if self in self._backlogs.unread:
            self._backlogs.unread.remove(self)
            self._backlogs.bytes -= self.bytes


class Backlog(Unread):
    """The bytes of one stream that the HTTP server has not taken yet. On exit, the context manager takes them out
    of the total of all clients.

    Attributes:
        failed: future of the error that ended the stream: its client is too slow, or producing an event failed.
        ended: True once the whole stream has been produced, or producing an event has failed.
    """

    def __init__(self, backlogs: Backlogs) -> None:
        super().__init__(backlogs, self.fail)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended = False
        self._made = bytearray()
        self._news = WakeUp()
        self._all_taken = WakeUp()
        self._handed_s: float | None = None  # when the piece in flight was handed to the HTTP server
        self._checking = self._check_in(backlogs.send_timeout_s)

    def __enter__(self) -> Backlog:
        return self

    def __exit__(self, *_: object) -> None:
        self.forget()
        self._checking.cancel()
        self.failed.cancel()

    def put(self, chunk: bytes) -> None:
        """Append bytes of the stream, unless it has failed. If too many bytes are unread, answers are ended."""
        if self.failed.done():
            return
        self._made += chunk
        self._news.set()
        self.add(len(chunk))
        if self.bytes > self._backlogs.limit_bytes and not self.failed.done():
            self.give_up("over --max-unread-bytes")

    def end(self) -> None:
        """Mark the stream as complete."""
        self.ended = True
        self._news.set()

    def fail(self, error: Exception) -> None:
        """End the stream with an error, and drop the bytes that the HTTP server was not handed yet.

        Does nothing if the stream has failed already.
        """
        if not self.failed.done():
            self.failed.set_exception(error)
            self.forget()
            self._made.clear()

    async def next_piece(self, limit: int | None = PIECE_BYTES) -> bytes:
        """Wait for bytes and return them; empty at the stream's end. Call `taken` once the bytes are sent.

        Args:
            limit: most bytes to return; None: all bytes produced so far, which are whole events.
        """
        while not self._made and not self.ended:
            await self._news.wait()
        piece = bytes(self._made[:limit])
        del self._made[:limit]
        self._handed_s = time.monotonic()
        return piece

    def taken(self, count: int) -> None:
        """Record that the HTTP server has taken `count` bytes, which are not counted as unread any more."""
        self._handed_s = None
        self.add(-count)
        if not self.bytes:
            self._all_taken.set()

    async def all_taken(self) -> None:
        """Wait until the HTTP server has taken all bytes of this backlog."""
        if self.bytes:
            await self._all_taken.wait()

    def _check_in(self, seconds: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, self._check)

    def _check(self) -> None:
        """Fail the stream if the HTTP server has not taken a piece in time. One timer serves all pieces."""
        left_s = limit_s = self._backlogs.send_timeout_s
        if self._handed_s is not None:
            left_s = self._handed_s + limit_s - time.monotonic()
        if left_s > 0:
            self._checking = self._check_in(left_s)
        else:
            self.fail(self._backlogs.too_slow())
