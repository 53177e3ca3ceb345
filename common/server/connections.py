"""Connections to clients: how many there are, how long each may take, and what is said to those that make no sense.

```text
opened ──> waits for a request ──> its head comes ──> its body comes ──> answered ──> waits again
           keep-alive timeout      body timeout       body timeout,      a body that goes on behind the answer
           closed                  408, closed        see `bodies`       is let by until that timeout: closed
```

The HTTP server itself has a timeout for the wait between two requests and none for the rest.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

import h11
import orjson
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from common.server.errors import ApiError, unavailable
from common.server.middleware import OPEN_PATHS, refuse
from common.server.request_log import log_refusal

logger = logging.getLogger(__name__)

#: Connections beyond the bound that are told so, and asked how the server is. Those beyond them are closed unheard.
SPARE_CONNECTIONS = 32
#: How long such a one may take: it is in the way of the next.
SPARE_TIMEOUT_S = 5.0
#: A client that takes less in its time takes nothing. The HTTP server holds 64 KiB of a stream, and goes on at 16.
MUST_TAKE_BYTES = 48 * 1024
#: Between two warnings that there are too many.
WARN_EVERY_S = 10.0
#: Files a server has open beside its connections: the model's, its log, the event loop's.
OTHER_FILES = 128


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What connections may take.

    Attributes:
        connections: at a time.
        keep_alive_s: without a request.
        receive_s: for the head of a request to come.
        send_s: to take `MUST_TAKE_BYTES` of an answer that is complete, while more than 64 KiB of it are left.
    """

    connections: int = 1024
    keep_alive_s: float = 60.0
    receive_s: float = 30.0
    send_s: float = 60.0


class Config(uvicorn.Config):
    """The HTTP server's settings, with limits for its connections."""

    def __init__(self, app: ASGIApp, limits: ConnectionLimits, **settings: Any) -> None:
        super().__init__(app, http=Connection, **settings)
        self.limits = limits
        self.last_warning_s = -WARN_EVERY_S

    def warn(self) -> None:
        """There are too many connections. Said now and then: whoever opens them may open thousands."""
        if time.monotonic() - self.last_warning_s >= WARN_EVERY_S:
            self.last_warning_s = time.monotonic()
            logger.warning(
                "%d connections are open, the most that --max-connections allows: more are refused",
                self.limits.connections,
            )


class Connection(H11Protocol):
    """uvicorn's connection, within limits."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = config.limits
        self._warn = config.warn
        self._receive_s = self._limits.receive_s
        self._keep_alive_s = self._limits.keep_alive_s
        self._receiving: asyncio.TimerHandle | None = None  # ends a request that does not come whole
        self._sending: asyncio.TimerHandle | None = None  # ends an answer that is not taken

    # ------------------------------------------------------------------ opened and closed

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        beyond = len(self.connections) - self._limits.connections
        if beyond > 0:
            self._warn()
            self.app = TooMany(self.app)
            self._receive_s = self._keep_alive_s = SPARE_TIMEOUT_S
        if beyond > SPARE_CONNECTIONS:
            transport.abort()
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._stop_receiving()
        self._stop_sending()

    # ------------------------------------------------------------------ requests that come slowly, or never

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()  # uvicorn's own
        self._watch()

    def _watch(self) -> None:
        """Whatever is waited for has its time: the rest of a request, or the next one."""
        if self.transport.is_closing():
            return
        waiting = self.conn.their_state is h11.IDLE
        if self.conn.their_state is h11.SEND_BODY or (waiting and self.conn.trailing_data[0]):
            if self._receiving is None:
                self._receiving = self.loop.call_later(self._receive_s, self._on_late)
            return
        self._stop_receiving()
        if waiting and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self._keep_alive_s, self.timeout_keep_alive_handler
            )

    def _stop_receiving(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _on_late(self) -> None:
        self._receiving = None
        if self.conn.our_state is h11.IDLE:
            self._refuse(
                ApiError(
                    408, f"the request did not come within {self._receive_s:g} s", code="request_timeout"
                )
            )
        elif self.cycle.response_complete:
            self.transport.close()
        # Or the app reads the body, and has a deadline for it.

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP: told as all errors are, if an answer has not begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(ApiError(400, msg, code="invalid_http"))
        else:
            self.transport.close()

    def _refuse(self, refusal: ApiError) -> None:
        """Answer without the app, and close."""
        log_refusal(refusal, refusal.status, refusal)
        body = orjson.dumps(refusal.body())
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=refusal.status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    # ------------------------------------------------------------------ answers that are not taken

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending()

    def _watch_sending(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        self._sending = self.loop.call_later(self._limits.send_s, self._on_unread, unsent)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_sending()

    def _stop_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _on_unread(self, unsent: int) -> None:
        """Some time ago, `unsent` bytes waited for the client."""
        if (
            not self.cycle.response_complete
            or unsent - self.transport.get_write_buffer_size() >= MUST_TAKE_BYTES
        ):
            self._watch_sending()  # while it is not complete, the app waits, and has a deadline of its own
        else:
            logger.info("a client took too little of its answer for %g s: closed", self._limits.send_s)
            self.transport.abort()


class TooMany:
    """The app for connections beyond the bound: it says how the server is, and refuses the rest."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        refusal = unavailable(
            "too many connections are open (the server's option --max-connections); try again shortly",
            code="too_many_connections",
            retry_after_s=1,
        )
        refusal.headers["Connection"] = "close"
        await refuse(refusal, scope, receive, send)


# ---------------------------------------------------------------------- what the operating system does


def find_lost_peers(listener: socket.socket, within_s: float) -> None:
    """Let the kernel end a connection whose peer takes nothing, or is no longer there. Connections inherit it."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    ask_s = max(1, int(within_s / 4))
    if sys.platform == "linux":
        # Of what waits for a peer, or of a question whether it is there: none may stay unanswered for longer.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(within_s * 1000))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ask_s)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ask_s)
    elif sys.platform == "darwin":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPALIVE, ask_s)


def allow_open_files(connections: int) -> int:
    """Let the process open as many files as that takes: how many connections it can have, which may be fewer."""
    if sys.platform == "win32":
        return connections
    import resource

    needed = connections + SPARE_CONNECTIONS + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return connections
    if hard == resource.RLIM_INFINITY or hard >= needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        return connections
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    possible = max(1, hard - SPARE_CONNECTIONS - OTHER_FILES)
    logger.warning(
        "--max-connections %d would need %d open files, and this process may have %d (ulimit -Hn): %d connections",
        connections,
        needed,
        hard,
        possible,
    )
    return possible
