"""A transport that closes so that the client can still read its answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

#: How long a client may go on sending after the answer has ended its connection.
LINGER_S = 5.0


class LingeringTransport(asyncio.Transport):
    """A socket's transport whose `close` waits for the client to stop sending.

    A socket that is closed while bytes of the client wait in it resets the connection, and the client may lose an
    answer that it has not read. So the client is told that nothing more will come, its bytes are dropped, and the
    socket is closed when the client closes, or a few seconds later. nginx calls this a lingering close.

    Args:
        transport: the socket's.
        may_be_sending: returns whether bytes of the client may be on their way.
        linger_s: how long the client may go on sending.
    """

    def __init__(
        self, transport: asyncio.Transport, may_be_sending: Callable[[], bool], linger_s: float
    ) -> None:
        super().__init__()
        self._transport = transport
        self._may_be_sending = may_be_sending
        self._linger_s = linger_s
        self._lingering: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Send what is left of the answer, and close, at once or after the client has stopped sending."""
        if self.is_closing():
            return
        if not self._may_be_sending():
            self._transport.close()
            return
        self._lingering = asyncio.get_running_loop().call_later(self._linger_s, self._transport.close)
        # Not with TLS, which cannot: there, the client finds the end of the answer by its length.
        if self._transport.can_write_eof():
            with contextlib.suppress(OSError):  # reset by the client, which is about to be noticed
                self._transport.write_eof()
        self._transport.resume_reading()

    def hurry(self, linger_s: float) -> None:
        """Close a lingering connection after so long, counted from now."""
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = asyncio.get_running_loop().call_later(linger_s, self._transport.close)

    def on_lost(self) -> None:
        """Stop waiting: the connection is closed."""
        if self._lingering is not None:
            self._lingering.cancel()

    def is_closing(self) -> bool:
        """Return whether the connection is closed or lingers: the client's bytes are of no interest any more."""
        return self._lingering is not None or self._transport.is_closing()

    def abort(self) -> None:
        self._transport.abort()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._transport.write(data)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)
