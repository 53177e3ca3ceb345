"""ASGI middleware, in the order in which a request meets it.

A proxy's path prefix is stripped. The request gets an id, its answer is counted, and an unexpected error of the app
is answered. Clients on too many connections, clients without a key, and pages of other sites are turned away.

A page that a user opens can send requests to every server that the user's machine reaches, this one included. A
browser lets the page read answers only if both have one origin. There are two ways around that. `OwnPages` closes
both on a server without keys:

- *DNS rebinding*: the page's own name suddenly points to this machine. Then the browser sends the page's name as
  `Host`, so the server answers only to names that no stranger controls.
- Requests whose answers the page need not read: they cost time all the same. Browsers say in `Sec-Fetch-Site`
  where a request comes from. Old browsers, and all browsers at an address without TLS that is not loopback, say it
  in `Origin` only.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import socket
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.server.errors import (
    SHOULD_RETRY,
    ApiError,
    error_response,
    internal_error,
    is_anthropics,
    shorten,
    unavailable,
)
from common.server.logs import log_refusal

#: Paths that need no key. They tell nothing about requests, and monitoring has no key. A browser that opens the
#: page has none either: the page asks for it, and sends it with its requests.
OPEN_PATHS = frozenset({"/", "/health", "/health/", "/ready", "/metrics", "/openai/metrics", "/version"})

TOO_MANY = "too_many_connections"  # in the state of requests on connections beyond the bound on their number

REQUEST_ID = "x-request-id"
IGNORED = "x-infer-ignored"  # header: paths of the body's fields that the server does not know
MESSAGES_REQUEST_ID = "request-id"  # the same, where Anthropic's libraries look for it

_REQUEST_ID_FORM = re.compile(r"[!-~]{1,128}")  # ASCII without spaces: it is written into a log


class Middleware(ABC):
    """Base class: `handle` gets HTTP requests only. Lifespan messages go straight to the app."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handle = self.handle if scope["type"] == "http" else self.app
        await handle(scope, receive, send)

    @abstractmethod
    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on to the app."""


class RootPath(Middleware):
    """Strips a proxy's prefix from paths, which the proxy may have stripped already."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        super().__init__(app)
        self._root_path = root_path

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, root_path = scope["path"], self._root_path
        if path == root_path or path.startswith(root_path + "/"):
            path = path.removeprefix(root_path) or "/"
        await self.app({**scope, "path": path}, receive, send)


def cors_settings(origins: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of `CORSMiddleware` that let pages of these origins use the whole API."""
    return {
        "allow_origins": origins,
        "allow_methods": ["GET", "POST", "DELETE"],
        "allow_headers": ["*"],
        "allow_private_network": True,  # Chrome asks for it if a public page calls a server of a private network
        "expose_headers": [REQUEST_ID, MESSAGES_REQUEST_ID, IGNORED, "Retry-After", SHOULD_RETRY],
    }


class Answers(Middleware):
    """Gives every answer the `x-request-id` of its request, or a generated one, names ignored fields, and counts
    answers by status and error code. Answers 500 to an exception that no handler takes, and logs it.

    Starlette's own middleware for such exceptions is outside all others, so its answers lack id and CORS headers.
    It also raises the exception again, and uvicorn closes the connection: a client that sends its next request at
    that moment loses it.

    Sets `request_id` in the request's state, and `named`: whether the request came with it. A route puts the text
    of `x-infer-ignored` into the state, as `ignored`. An error's answer has put its code there, as `error_code`.
    """

    def __init__(self, app: ASGIApp, counts: Counter[tuple[int, str]]) -> None:
        super().__init__(app)
        self._counts = counts

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(REQUEST_ID)
        is_valid = given is None or _REQUEST_ID_FORM.fullmatch(given) is not None
        request_id = given if given is not None and is_valid else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["named"] = request_id == given
        state["request_id"] = request_id
        begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                self._counts[message["status"], state.get("error_code", "")] += 1
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = request_id
                if "ignored" in state:
                    headers[IGNORED] = state["ignored"]
                if is_anthropics(scope["path"]):
                    headers[MESSAGES_REQUEST_ID] = request_id
            await send(message)

        if not is_valid:
            refusal = ApiError(
                400,
                f"{REQUEST_ID} is up to 128 characters of ASCII without spaces",
                code="invalid_request_id",
            )
            await refuse(refusal, scope, receive, send_with_id)
            return
        try:
            await self.app(scope, receive, send_with_id)
        except Exception as error:
            if begun:  # the HTTP server closes the connection, so that the client sees that its answer is cut
                raise
            await refuse(internal_error(), scope, receive, send_with_id, error=error)


class Guard(Middleware):
    """Base class of middleware that may refuse a request, except for paths in `OPEN_PATHS`."""

    @abstractmethod
    def refusal(self, scope: Scope) -> ApiError | None:
        """Return the error that refuses a request; None for a request that may pass."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None if scope["path"] in OPEN_PATHS else self.refusal(scope)
        if refusal is None:
            await self.app(scope, receive, send)
        else:
            await refuse(refusal, scope, receive, send)


class TooMany(Guard):
    """Refuses requests on connections beyond the bound on their number, which have `TOO_MANY` in their state."""

    def refusal(self, scope: Scope) -> ApiError | None:
        if TOO_MANY not in scope["state"]:
            return None
        refusal = unavailable(
            "too many connections are open, of all clients or of one address (the server's options "
            "--max-connections and --max-connections-per-address); try again shortly",
            code="too_many_connections",
            retry_after_s=1,
        )
        refusal.headers["Connection"] = "close"
        return refusal


class ApiKeys(Guard):
    """Refuses requests without one of the server's keys as `Authorization: Bearer KEY` or as `X-Api-Key: KEY`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        super().__init__(app)
        self._keys = [key.encode() for key in keys]

    def refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = [key if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        sent = [each.strip().encode("latin-1") for each in given]  # the headers' bytes as they came
        if any(secrets.compare_digest(key, each) for key in self._keys for each in sent):
            return None
        return ApiError(
            401,
            "this server wants a key; send it as Authorization: Bearer KEY, or as X-Api-Key: KEY",
            type="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


class OwnPages(Guard):
    """Refuses requests whose `Host` is not allowed, and requests from pages of sites that are not in `origins`. A
    user may follow a link on another site to this server."""

    def __init__(self, app: ASGIApp, hosts: AllowedHosts, origins: Sequence[str]) -> None:
        super().__init__(app)
        self._hosts = hosts
        self._origins = frozenset(origins)

    def refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._hosts.allow(host):
            name = shorten(_without_port(host), 100)
            return _forbidden(
                "host_not_allowed",
                f"this server does not answer to the name {name!r}: call it by its address, or start it with "
                f"--allowed-host {name} or with --api-key",
            )
        if self._is_of_another_site(scope["method"], headers):
            of = f" {shorten(headers['origin'], 100)}" if "origin" in headers else ""
            return _forbidden(
                "cross_site",
                f"pages of other sites may not use this server: to allow one, start it with --cors-origin{of}",
            )
        return None

    def _is_of_another_site(self, method: str, headers: Headers) -> bool:
        follows_link = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
        origin = headers.get("origin")
        if follows_link or "*" in self._origins or origin in self._origins:
            return False
        site = headers.get("sec-fetch-site")
        if site is not None or origin is None:
            return site == "cross-site"
        return origin.partition("://")[2] != headers.get("host", "").lower()


class AllowedHosts:
    """The names that the server answers to.

    They are IP addresses, `localhost`, the machine's own name, the name the server listens on (`host`), names that
    end as no name of the internet does, and the names given with `--allowed-host` (`others`). If that option is
    missing, a server that other machines reach answers to all names, because its users call it by names that it
    cannot know. Ollama does the same.
    """

    LOCAL_ENDINGS = (".localhost", ".local", ".internal")

    def __init__(self, host: str, others: Sequence[str] = ()) -> None:
        self._any = "*" in others or not (others or _is_loopback(host))
        known = ("localhost", socket.gethostname(), host, *others)
        self._names = {_without_port(name) for name in known}

    def allow(self, header: str) -> bool:
        """Return whether a request with this `Host` is answered; True if empty: no browser leaves it out."""
        name = _without_port(header)
        return (
            self._any
            or not name
            or name in self._names
            or name.endswith(self.LOCAL_ENDINGS)
            or ip_address(name) is not None
        )


def _forbidden(code: str, message: str) -> ApiError:
    return ApiError(403, message, type="permission_error", code=code)


def _without_port(host: str) -> str:
    """Return the name or address in a `Host` header, in lower case and without a final dot."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    if ip_address(host) is not None:  # an IPv6 address without brackets, as in an option
        return host
    return host.partition(":")[0].removesuffix(".")


def ip_address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parse an IP address. Returns None if the text is not one."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    """Return whether a server that listens on `host` can be reached from this machine only."""
    address = ip_address(host)
    return host == "localhost" if address is None else address.is_loopback


async def refuse(
    refusal: ApiError, scope: Scope, receive: Receive, send: Send, *, error: Exception | None = None
) -> None:
    """Send a refusal instead of the app's answer, and log it, with the traceback of `error` if there is one."""
    state = scope.setdefault("state", {})
    state["error_code"] = refusal.code
    request_id = state.get("request_id")  # None in the front of a cluster
    log_refusal(refusal, refusal.status, error or refusal, client=client_of(scope), request_id=request_id)
    await error_response(scope["path"], refusal, request_id)(scope, receive, send)


def client_of(scope: Scope) -> str | None:
    """Return the address that a request came from; None if the HTTP server does not know it."""
    client: tuple[str, int] | None = scope.get("client")
    return client[0] if client else None
