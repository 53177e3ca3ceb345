"""ASGI middleware around every route: a proxy's prefix is removed, a request gets an id and shows its key, and
refusals are paced while the engine computes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import secrets
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.server.errors import SHOULD_RETRY, ApiError
from common.server.request_log import log_refusal
from common.server.transport import json_response

#: What is told without a key: nothing in it is anybody's, and whoever watches over servers has none. A browser has
#: none either when it opens the page: that asks for one, and sends it with all that it asks.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics", "/version"})

REQUEST_ID = "x-request-id"
_REQUEST_ID_FORM = re.compile(r"[!-~]{1,128}")  # ASCII without spaces: it is written into a log


def cors_settings(origins: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of `CORSMiddleware` that let pages of these origins use the whole API."""
    return {
        "allow_origins": origins,
        "allow_methods": ["GET", "POST"],
        "allow_headers": ["*"],
        "expose_headers": [REQUEST_ID, "Retry-After", SHOULD_RETRY],
    }


class RequestIds:
    """Every answer has the `x-request-id` of its request, or one made up for it.

    In the request's state: `request_id`, and `named`, whether the client chose it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID)
        if given is not None and _REQUEST_ID_FORM.fullmatch(given) is None:
            await refuse(
                ApiError(
                    400,
                    f"{REQUEST_ID} is up to 128 characters of ASCII without spaces",
                    code="invalid_request_id",
                ),
                scope,
                receive,
                send,
            )
            return
        request_id = given or uuid.uuid4().hex
        state = {**scope.get("state", {}), "request_id": request_id, "named": given is not None}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        await self.app({**scope, "state": state}, receive, send_with_id)


class RootPath:
    """Paths are the app's own, whether or not a proxy has taken its prefix away."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self.app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if path == self._root_path or path.startswith(self._root_path + "/"):
            scope = {**scope, "path": path.removeprefix(self._root_path) or "/"}
        await self.app(scope, receive, send)


class HeadAsGet:
    """ASGI middleware: runs the GET route for HEAD, and ends the answer with its head.

    A route that streams until its client leaves stops there, too, before it has made anything.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send(message)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            raise HeadSentError

        with contextlib.suppress(HeadSentError):
            await self.app({**scope, "method": "GET"}, receive, send_head)


class HeadSentError(Exception):
    """The answer to HEAD is complete."""


class ApiKeys:
    """A server with keys answers those who send one of them, as `Authorization: Bearer KEY`.

    Keys are compared by their digests and all of them, so the time tells nothing of how much was right.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._has_key(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        await refuse(
            ApiError(
                401,
                "this server wants a key; send it as Authorization: Bearer KEY",
                type="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            ),
            scope,
            receive,
            send,
        )

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = _digest(key.strip().encode("latin-1"))  # a header's bytes, whatever they mean
        same = [secrets.compare_digest(digest, each) for each in self._digests]
        return scheme.lower() == "bearer" and any(same)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class PaceRefusals:
    """Bounds how many refusals leave in a second while the engine computes.

    A client that sends the next request when the last one is refused costs the server as much as it likes: two
    megabytes are received, parsed and thrown away many times a second, and answers that others wait for come late.
    A refusal that waits half a second makes such a client wait, too.

    Args:
        is_computing: whether answers are being computed. If not, refusals leave at once.
    """

    PER_S = 16  # refusals a second, once `BURST` have left at once
    BURST = 32
    MOST_S = 2.0  # that one refusal waits
    MOST_WAITING = 64  # at the same time: each may hold the body that was refused

    def __init__(self, app: ASGIApp, is_computing: Callable[[], bool]) -> None:
        self.app = app
        self._is_computing = is_computing
        self._next_s = 0.0  # when the next refusal may leave, were there no burst
        self._waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return

        async def paced(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                await self._turn()
            await send(message)

        await self.app(scope, receive, paced)

    async def _turn(self) -> None:
        """Wait until this refusal may leave."""
        now = asyncio.get_running_loop().time()
        earliest = max(self._next_s, now - self.BURST / self.PER_S)
        self._next_s = min(earliest + 1 / self.PER_S, now + self.MOST_S)
        if self._next_s <= now or self._waiting >= self.MOST_WAITING or not self._is_computing():
            return
        self._waiting += 1
        try:
            await asyncio.sleep(self._next_s - now)
        finally:
            self._waiting -= 1


def client_of(scope: Scope) -> str | None:
    """Return the address that a request came from; None if the HTTP server does not know it."""
    client: tuple[str, int] | None = scope.get("client")
    return client[0] if client else None


async def refuse(refusal: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer in the place of the app, and say so in the log."""
    log_refusal(refusal, refusal.status, refusal, client=client_of(scope))
    await json_response(refusal.body(), refusal.status, refusal.headers)(scope, receive, send)
