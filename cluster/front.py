"""The front: the deployment that Ray Serve's proxy hands every request to. It passes them to replicas.

```text
client ── HTTP ──> Serve's proxy ──> front ──┬──> replica a
                                             └──> replica b
```

Serve's proxy could pass requests to the replicas itself. But it chooses a replica before it has read the body, so
it cannot choose by the prompt; it tries no request twice; and it cuts the connection if a replica is lost. The
front reads the body first. It holds an answer back until the first byte of its body comes, so until then another
replica can answer. And it ends a stream whose replica is lost.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from cluster.forwarding import (
    GENERATING,
    PASSED,
    Forwarded,
    Whole,
    body_of,
    read_holder,
    read_keys,
    replica_lost,
)
from cluster.merging import HEALTH, MERGES, METRICS, merge
from common.errors import EngineDeadError, ShuttingDownError
from common.server.api.bodies import read_json, says_json
from common.server.errors import ApiError, error_response, from_exception, unavailable
from common.server.http.middleware import (
    REQUEST_ID,
    AllowedHosts,
    ApiKeys,
    OwnPages,
    cors_settings,
)
from common.server.options import CommonOptions

logger = logging.getLogger(__name__)

UNAVAILABLE = 503

#: The exceptions that mean that a replica is gone or its engine dead, or that Serve has no replica.
LOST = (RayError, RayServeException, EngineDeadError)

#: Routes that are answered 503 while the cluster drains, as by a single server. Other routes still report the
#: cluster's state.
REFUSED_WHILE_DRAINING = GENERATING | {"/ready", "/reset_prefix_cache"}

#: Routes whose answer is merged from those of all replicas.
MERGED = {HEALTH, *MERGES}

#: Other paths of routes whose answers are merged.
ALIASES = {"/health/": HEALTH, "/openai/metrics": METRICS}

WAIT_S = 60.0  # seconds that a request waits for a replica before it is answered 503
READ_WAIT_S = 5.0  # the longest that routes which only read wait for the first replica's answer, in seconds
LATE_S = 0.5  # and the longest that they wait for the others' answers after that


def pass_through() -> Router:
    """Return an ASGI app that hands every path to the front of its process. Serve calls this in that process."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        front: Front = serve.get_replica_context().servable_object
        await front.guarded(scope, receive, send)

    return Router(default=app)


@serve.ingress(pass_through)
class Front:
    """Passes requests to replicas, and merges the answers of all replicas where a route asks for them.

    Args:
        replicas: handle of the deployment of replicas.
        options: the server's options (`CommonOptions`).
        wanted: the smallest number of replicas that the cluster should have.

    Attributes:
        guarded: the ASGI app behind the checks that need no body, which replicas do not repeat.
    """

    def __init__(self, replicas: DeploymentHandle, options: dict[str, Any], *, wanted: int) -> None:
        self._replicas = replicas
        self._streams = replicas.options(stream=True, method_name="stream")
        self._wanted = wanted
        server_options = CommonOptions(**options)
        self._body_timeout_s = server_options.body_timeout
        self._running = 0  # requests that have come whole, and whose answer is not complete
        self._draining = False
        self.guarded = guarded(self._answer, server_options)

    async def drain(self) -> None:
        """Refuse new requests to `REFUSED_WHILE_DRAINING` from now on. Returns when all answers are complete."""
        self._draining = True
        while self._running:
            await asyncio.sleep(0.1)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. If its client leaves, Serve cancels this, and the request to the replica with it."""
        request = Request(scope, receive)
        path = ALIASES.get(request.url.path, request.url.path)
        try:
            forwarded = await self._read(request, path)
        except ClientDisconnect:
            return
        except ApiError as error:
            await error_response(path, error, None)(scope, receive, send)
            return
        self._running += 1
        try:
            response = await self._respond(forwarded)
            await response(scope, receive, send)
        finally:
            self._running -= 1

    async def _respond(self, request: Forwarded) -> Response:
        """Return one replica's answer or, on some routes, an answer merged from those of all replicas."""
        path = request.path
        try:
            if self._draining and path in REFUSED_WHILE_DRAINING:
                raise from_exception(ShuttingDownError("the cluster is shutting down"))
            return await (self._merge(request) if path in MERGED else self._pass_on(request))
        except ApiError as error:
            return error_response(path, error, None)
        except EngineDeadError as error:
            return error_response(path, from_exception(error), None)
        except LOST:
            return error_response(path, replica_lost(), None)

    async def _read(self, request: Request, path: str) -> Forwarded:
        """Read a request. A body whose content type is not JSON is left unread: the replica does not need it.

        Raises:
            ApiError, ClientDisconnect: as `read_json`.
        """
        body = await read_json(request, self._body_timeout_s) if says_json(request) else b""
        scope = {name: request.scope[name] for name in PASSED if name in request.scope}
        scope |= {"path": path, "raw_path": path.encode()}
        if request.method == "HEAD" and path in MERGED:
            scope["method"] = "GET"  # merging needs bodies; the HTTP server drops the merged one
        return Forwarded(scope, body, keys=read_keys(path, body), holder=read_holder(path, body))

    # ------------------------------------------------------------------ one replica's answer

    async def _pass_on(self, request: Forwarded) -> Response:
        """Return the answer of the first replica that accepts the request.

        If a replica refuses the request with a 503, the next one is asked, until all were. If a replica is lost
        before the first byte of its answer's body, or its engine dies, only one other replica is asked: the request
        itself may have killed the engine.
        """
        lost = False
        while True:
            name = ""
            reply = self._streams.remote(request)
            try:
                async with asyncio.timeout(WAIT_S):
                    name = await anext(reply)
                start, *first = await _begin(reply)
            except LOST:
                if lost:
                    raise
                lost = True
            except TimeoutError:
                reply.cancel()
                raise no_replica() from None
            else:
                tried = name in request.avoid or name == request.holder
                if start["status"] != UNAVAILABLE or tried:
                    return _response(start, _parts(start, first, reply))
                reply.cancel()
            request = dataclasses.replace(request, avoid=(*request.avoid, name))

    # ------------------------------------------------------------------ all replicas' answers

    async def _merge(self, request: Forwarded) -> Response:
        """Return the merged answer of all replicas that could answer. If a replica hangs, routes that only read
        answer without it.

        Raises:
            ApiError: no replica has answered in time.
        """
        wait_s, late_s = (READ_WAIT_S, LATE_S) if request.scope["method"] == "GET" else (WAIT_S, WAIT_S)
        try:
            # `results_async` would wait for all replicas, or give up the answers of all if one of them hangs.
            async with asyncio.timeout(wait_s):
                asked = await self._replicas.broadcast("whole", request)._fetch_replica_results_async()
        except TimeoutError:
            raise no_replica() from None
        waiting = [asyncio.ensure_future(each.get_async()) for each in asked]
        if waiting:
            await asyncio.wait(waiting, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(waiting, timeout=late_s)
        replies: dict[str, Whole] = {}
        for each in waiting:
            if not each.done():
                each.cancel()
            elif each.exception() is None:
                name, start, body = each.result()
                replies[name] = start, body
            elif not isinstance(each.exception(), LOST):
                logger.warning("a replica could not answer %s: %r", request.path, each.exception())
        if not replies:
            raise no_replica()
        return _response(*merge(request.path, replies, wanted=self._wanted, draining=self._draining))


async def _begin(reply: DeploymentResponseGenerator) -> list[Message]:
    """Return the messages of an answer up to the first of its body."""
    messages: list[Message] = []
    while len(messages) < 2:
        messages += await anext(reply)
    return messages


async def _parts(
    start: Message, ready: list[Message] | None, reply: DeploymentResponseGenerator
) -> AsyncIterator[bytes]:
    """Yield an answer's body as it comes.

    If a stream's replica is lost, yield the error that ends the stream. The replica has written it when the stream
    began (`common.server.api.stream`).
    """
    try:
        while ready is not None:
            yield b"".join(map(body_of, ready))
            ready = await anext(reply, None)
    except LOST:
        yield start.get("lost", b"")
    finally:
        reply.cancel()  # harmless for one that is done


def _response(start: Message, body: bytes | AsyncIterator[bytes]) -> Response:
    """Return an answer for the client. Serve adds the request's id, which the replica was given, to the headers."""
    status = start["status"]
    response = (
        Response(body, status) if isinstance(body, bytes) else StreamingResponse(body, status_code=status)
    )
    response.raw_headers = [(name, value) for name, value in start["headers"] if name != REQUEST_ID.encode()]
    return response


def guarded(app: ASGIApp, options: CommonOptions) -> ASGIApp:
    """Return an app behind the checks of keys, hosts and origins, in the order of `create_app`."""
    if options.api_key:
        app = ApiKeys(app, options.api_key)
    else:
        app = OwnPages(app, AllowedHosts(options.host, options.allowed_host), options.cors_origin)
    if options.cors_origin:
        app = CORSMiddleware(app, **cors_settings(options.cors_origin))
    return ProxyHeadersMiddleware(app, options.forwarded_allow_ips)  # type: ignore[return-value,arg-type]  # uvicorn has types of its own


def no_replica() -> ApiError:
    return unavailable("no replica takes requests; one may be on its way", code="no_replica", retry_after_s=5)
