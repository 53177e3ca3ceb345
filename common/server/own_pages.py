"""Keeps pages of other sites away from a server that has no keys.

A page that a user opens can send requests to every server that the user's machine reaches, this one included. A
browser lets the page read answers only if both have one origin. There are two ways around that:

- *DNS rebinding*: the page's own name suddenly points to this machine. Then the browser sends the page's name as
  `Host`, so the server answers only to names that no stranger controls.
- Requests whose answers the page need not read: they cost time all the same. Browsers say in `Sec-Fetch-Site`
  where a request comes from.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from common.server.errors import ApiError, shorten
from common.server.middleware import OPEN_PATHS, refuse


class AllowedHosts:
    """The names by which a server may be called.

    They are IP addresses, `localhost` and names below it, the machine's own name, the name the server listens on,
    and those of `--allowed-host`. A server that other machines reach also answers to names without a dot, such as
    those of containers: no site on the internet has one.

    Args:
        host: the name or address the server listens on.
        others: further names; `*` stands for all.
    """

    def __init__(self, host: str, others: Sequence[str] = ()) -> None:
        self._any = "*" in others
        self._short_names = not _is_loopback(host)
        known = ("localhost", socket.gethostname(), host, *others)
        self._names = {_without_port(name) for name in known}

    def allow(self, header: str) -> bool:
        """Return whether a request with this `Host` is answered. Only clients that are no browsers send none."""
        name = _without_port(header)
        return (
            self._any
            or not name
            or name in self._names
            or name.endswith(".localhost")
            or _address(name) is not None
            or (self._short_names and "." not in name)
        )


class OwnPages:
    """ASGI middleware: refuses requests under a name that is not allowed, and requests of other sites' pages.

    A user may follow another site's link to this server, and read the paths that need no key anywhere.

    Args:
        hosts: the names that are allowed.
        origins: sites whose pages may use the server; `*` stands for all.
    """

    def __init__(self, app: ASGIApp, hosts: AllowedHosts, origins: Sequence[str]) -> None:
        self.app = app
        self._hosts = hosts
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._hosts.allow(host):
            await refuse(host_not_allowed(host), scope, receive, send)
        elif self._is_of_another_site(scope["method"], headers):
            await refuse(cross_site(headers.get("origin")), scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _is_of_another_site(self, method: str, headers: Headers) -> bool:
        follows_link = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
        allowed = "*" in self._origins or headers.get("origin") in self._origins
        return headers.get("sec-fetch-site") == "cross-site" and not follows_link and not allowed


def host_not_allowed(host: str) -> ApiError:
    name = shorten(_without_port(host), 100)
    return ApiError(
        403,
        f"this server does not answer to the name {name!r}: call it by its address, or start it with "
        f"--allowed-host {name} or with --api-key",
        type="permission_error",
        code="host_not_allowed",
    )


def cross_site(origin: str | None) -> ApiError:
    of = "" if origin is None else f" {shorten(origin, 100)}"
    return ApiError(
        403,
        f"pages of other sites may not use this server: to allow one, start it with --cors-origin{of}",
        type="permission_error",
        code="cross_site",
    )


def _without_port(host: str) -> str:
    """Return the name or address in a `Host` header, in lower case and without a final dot."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    if _address(host) is not None:  # of IPv6, as an option has it
        return host
    return host.partition(":")[0].removesuffix(".")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address that a server listens on."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback
