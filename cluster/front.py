"""The front: the process between clients and replicas.

```text
client ── HTTP ── front ──┬── replica a
                          └── replica b
```

The front listens with the HTTP server of a single server (`common.server.http.connections`), so the same
limits hold for
connections, heads and bodies. Ray's proxy could pass requests to replicas itself. But it has no such limits, routes
before it has read the body, tries no request twice, and cuts the connection if a replica is lost. The front reads
the body first. It holds the head of an answer back until the first byte of its body comes, so until then another
replica can answer.

An application of a Serve config file is different: Serve starts its proxy, and the front stands behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.answer import Answer
from cluster.forwarding import GENERATING, Forwarded, Whole, read_holder, read_keys, replica_lost
from cluster.merging import HEALTH, MERGES, METRICS, health, merge
from common.errors import ShuttingDownError
from common.server.api.bodies import Bodies, says_json
from common.server.api.stream import while_connected
from common.server.errors import ApiError, from_exception, unavailable
from common.server.http.connections import Config, ConnectionLimits
from common.server.http.middleware import (
    REQUEST_ID,
    AllowedHosts,
    ApiKeys,
    OwnPages,
    RequestIds,
    client_of,
    cors_settings,
)
from common.server.http.sockets import allow_open_files, bind, find_lost_peers
from common.server.logs import PULSE_EVERY_S
from common.server.options import CommonOptions
from common.startup.memory import return_freed_memory

logger = logging.getLogger(__name__)

#: Error codes with which a healthy replica refuses a request that another replica may accept.
BUSY = {"queue_full", "shutting_down", "engine_stuck"}

#: Error code of a dead engine. This request may have killed it, so only one other replica gets it.
DEAD = "engine_dead"

#: Routes that are answered 503 while the cluster drains, as by a single server. Other routes still report the
#: cluster's state.
REFUSED_WHILE_DRAINING = GENERATING | {"/ready", "/reset_prefix_cache"}

#: Other paths of routes whose answers are merged.
ALIASES = {"/health/": HEALTH, "/openai/metrics": "/metrics"}

#: Most connections of clients. Requests that are too many for an engine are refused by the engine itself.
MAX_CONNECTIONS = 8192

#: Rate of large bodies, in bytes a second: half of a single server's, since each is copied by two processes.
BODY_BYTES_PER_S = 4 * 2**20

#: The longest that `/health` waits for the replicas, in seconds.
HEALTH_WAIT_S = 5.0

#: The longest that `/health` waits for the others once a replica has answered, in seconds.
LATE_S = 0.5

#: Seconds for which the replicas' answers to `/health` are used. Replicas are asked anew after a quarter of that.
HEALTH_AGE_S = 1.0

#: Seconds for which a merged answer to `/metrics` is sent again.
METRICS_AGE_S = 0.5


class ReplicaLostError(Exception):
    """A replica will not answer any more."""


#: The exceptions that mean that a replica is gone, or that Serve has none.
LOST = (ReplicaLostError, RayError, RayServeException)


def pass_through() -> Router:
    """Return an ASGI app that hands every path to the front of its process. Serve calls this in that process."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        front: Front = serve.get_replica_context().servable_object
        await front.guarded(scope, receive, send)

    return Router(default=app)


@serve.ingress(pass_through)
class Front:
    """Forwards requests to replicas, and merges the answers of all replicas where a route asks for them.

    Args:
        replicas: handle of the deployment of replicas.
        options: the server's options (`CommonOptions`).
        wanted: the smallest number of replicas that the cluster should have.
        wait_s: how long a request waits for a replica, in seconds.
        listen_at: host and port to listen on. None: Serve's proxy listens, and hands requests over.

    Attributes:
        guarded: the ASGI app behind the checks that need no body, which replicas do not repeat.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        replicas: DeploymentHandle,
        options: dict[str, Any],
        *,
        wanted: int,
        wait_s: float,
        listen_at: tuple[str, int] | None,
    ) -> None:
        self._replicas = replicas
        self._streams = replicas.options(stream=True, method_name="stream")
        self._wanted = wanted
        self._wait_s = wait_s
        server_options = CommonOptions(**options)
        self._bodies = Bodies(server_options.body_timeout, BODY_BYTES_PER_S)
        self._known: set[str] = set()  # names of replicas that answered once; a missing one is lost
        # When the replicas were asked for their `/health`, and their answers.
        self._probed: tuple[float, dict[str, Whole]] = (-math.inf, {})
        self._probing: asyncio.Task[None] | None = None
        self._merging: asyncio.Task[Whole] | None = None  # the latest merged answer to `/metrics`
        self._merged_s = 0.0  # when it was begun
        self._draining = False
        self._answers: set[Answer] = set()  # answers that are not complete
        self._returning = asyncio.create_task(keep_returning_memory())
        self.guarded = guarded(self._answer, server_options)
        if listen_at is not None:
            self._serving = await serve_http(
                RequestIds(self.guarded),
                *listen_at,
                body_timeout_s=server_options.body_timeout,
                **server_options.proxy_settings(),
            )

    # ------------------------------------------------------------------ the end (asked by the command)

    async def stop_accepting(self) -> None:  # async, to run on the event loop, where bodies are read
        """Begin to refuse new requests to `REFUSED_WHILE_DRAINING`, and requests whose body is still coming."""
        self._draining = True
        self._bodies.give_up()

    def num_running(self) -> int:
        """Return the number of requests whose answer is not complete."""
        return len(self._answers)

    # ------------------------------------------------------------------ requests

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Returns when the answer, or an error, is complete, or the client has left."""
        request = Request(scope, receive)
        answer = Answer(send, request.url.path)
        self._answers.add(answer)
        try:
            if self._draining and request.url.path in REFUSED_WHILE_DRAINING:
                raise from_exception(ShuttingDownError("the cluster is shutting down"))
            forwarded = await self._read(request)
            await while_connected(request.receive, self._reply(forwarded, answer))
        except ApiError as error:
            await answer.fail(error)
        except LOST:
            await answer.fail(replica_lost())
        except ClientDisconnect:
            pass  # closing the replica's stream has told the replica
        finally:
            self._answers.discard(answer)

    async def _read(self, request: Request) -> Forwarded:
        """Read a request. A body whose content type is not JSON is left unread: the replica does not need it.

        Raises:
            ApiError: as `Bodies.read_json`.
        """
        body = await self._bodies.read_json(request) if says_json(request) else b""
        path = ALIASES.get(request.url.path, request.url.path)
        # For HEAD, replicas are asked with GET: merging needs bodies. The HTTP server drops the merged one.
        is_merged = path == HEALTH or path in MERGES
        return Forwarded(
            method="GET" if request.method == "HEAD" and is_merged else request.method,
            path=path,
            query=request.scope["query_string"],
            headers=_headers_of(request),
            body=body,
            # Ray Serve's own proxy, which may stand in front, does not say whether the client chose the id.
            named=getattr(request.state, "named", True),
            client=client_of(request.scope),
            keys=read_keys(path, body),
            holder=read_holder(path, body),
        )

    async def _reply(self, request: Forwarded, answer: Answer) -> None:
        """Send the answer of one replica or, on some routes, an answer merged from the answers of all replicas."""
        if request.path == HEALTH:
            replies = await self._probe(request)
            head, body = health(replies, wanted=self._wanted, known=self._known, draining=self._draining)
        elif request.path == METRICS and request.method == "GET":  # a refusal of another method is not kept
            head, body = await self._metrics(request)
        elif request.path in MERGES:
            head, body = await self._merge(request)
        else:
            await self._pass_on(request, answer)
            return
        await answer.add(head)
        await answer.add(body)
        await answer.finish()

    async def _pass_on(self, request: Forwarded, answer: Answer) -> None:
        """Send the answer of the first replica that accepts the request.

        If a replica is busy, the next one is asked, until all were. If a replica is lost before the client got a
        byte, one other replica is asked.
        """
        lost = False
        while True:
            tried: list[str] = []
            try:
                if await self._try_one(request, answer, tried):
                    return
            except LOST:
                if lost or answer.begun:
                    raise
                lost = True
            request = dataclasses.replace(request, avoid=(*request.avoid, *tried))

    async def _try_one(self, request: Forwarded, answer: Answer, tried: list[str]) -> bool:
        """Forward the answer of one replica, and add its name to `tried`.

        Returns True once the answer is sent, or False if the replica is busy, was not asked before, and another
        replica may answer as well. The replica's refusal is then held back.

        Raises:
            ApiError: no replica took the request within `wait_s`.
            ReplicaLostError, RayError, RayServeException: the replica is lost.
        """
        reply = self._streams.remote(request)
        try:
            async with no_longer_than(self._wait_s):
                tried.append(await anext(reply))
            async for parts in reply:
                for part in parts:
                    await answer.add(part)
            refusal = answer.refusal
            if refusal == DEAD:
                raise ReplicaLostError
            if refusal in BUSY and tried[0] not in request.avoid and tried[0] != request.holder:
                return False
            await answer.finish()
            return True
        finally:
            reply.cancel()  # harmless for one that is done

    async def _probe(self, request: Forwarded) -> dict[str, Whole]:
        """Return the replicas' answers to `/health`, at most `HEALTH_AGE_S` seconds old.

        A busy replica answers late. If probes keep coming, they are answered from the last answers, and the
        replicas are asked anew meanwhile.

        Raises:
            ApiError: as `_ask_all`.
        """
        if request.method != "GET":
            return await self._ask_all(request, HEALTH_WAIT_S, LATE_S)

        async def ask(now_s: float) -> None:
            wait_s = min(self._wait_s, HEALTH_WAIT_S)
            self._probed = (now_s, await self._ask_all(request, wait_s, LATE_S))

        now_s = asyncio.get_running_loop().time()
        age_s = now_s - self._probed[0]
        if age_s > HEALTH_AGE_S / 4 and (self._probing is None or self._probing.done()):
            self._probing = asyncio.create_task(ask(now_s))
            # Reads the exception: asyncio would log it if no probe waits for the task.
            self._probing.add_done_callback(lambda probing: probing.exception())
        if age_s > HEALTH_AGE_S:
            assert self._probing is not None, "asked just now, or still being asked"
            await asyncio.shield(self._probing)
        return self._probed[1]

    async def _metrics(self, request: Forwarded) -> Whole:
        """Return the merged answer to `/metrics`, at most `METRICS_AGE_S` seconds old.

        Merging takes milliseconds on the event loop, and a client needs no key to ask for it.

        Raises:
            ApiError: as `_ask_all`.
        """
        now_s = asyncio.get_running_loop().time()
        if self._merging is None or (self._merging.done() and now_s - self._merged_s > METRICS_AGE_S):
            self._merged_s = now_s
            self._merging = asyncio.create_task(self._merge(request))
        return await asyncio.shield(self._merging)

    async def _merge(self, request: Forwarded) -> Whole:
        """Return the merged answer to a route of `MERGES`. If a replica hangs, routes that only read answer without
        it after `HEALTH_WAIT_S` seconds.

        Raises:
            ApiError: as `_ask_all`.
        """
        wait_s = self._wait_s if request.method == "POST" else min(self._wait_s, HEALTH_WAIT_S)
        return merge(request.path, await self._ask_all(request, wait_s, wait_s))

    async def _ask_all(self, request: Forwarded, wait_s: float, late_s: float) -> dict[str, Whole]:
        """Return the answers of all replicas that could answer, by name.

        Args:
            request: the request.
            wait_s: seconds to wait for the first answer.
            late_s: seconds to wait for the others after the first. A replica that hangs does not answer.

        Raises:
            ApiError: no replica has answered within `wait_s`.
        """
        async with no_longer_than(wait_s):
            # `results_async` would wait for all replicas, or give up the answers of all if one of them hangs.
            asked = await self._replicas.broadcast("whole", request)._fetch_replica_results_async()
        waiting = {asyncio.ensure_future(each.get_async()): each for each in asked}
        await asyncio.wait(waiting, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        answered, late = await asyncio.wait(waiting, timeout=late_s)
        for each in late:
            waiting[each].cancel()
            each.cancel()
        answers = {}
        for each in answered:
            try:
                name, head, body = each.result()
                answers[name] = head, body
            except LOST:
                pass
            except Exception as error:
                logger.warning("a replica could not answer %s: %r", request.path, error)
        if not answers:
            raise no_replica()
        if len(answers) >= self._wanted:
            self._known.clear()  # replicas that are not among these were replaced, or scaled away
        self._known.update(answers)
        return answers


def guarded(app: ASGIApp, options: CommonOptions) -> ASGIApp:
    """Return an app behind the checks of keys, hosts and origins, in the order of `create_app`."""
    if options.api_key:
        app = ApiKeys(app, options.api_key)
    else:
        app = OwnPages(app, AllowedHosts(options.host, options.allowed_host), options.cors_origin)
    if options.cors_origin:
        app = CORSMiddleware(app, **cors_settings(options.cors_origin))
    return app


def _headers_of(request: Request) -> tuple[tuple[bytes, bytes], ...]:
    """Return a request's headers, with the id that `RequestIds` gave it.

    Behind the proxy of Ray Serve there is no such id, and none is needed: the proxy's headers have one.
    """
    headers: list[tuple[bytes, bytes]] = request.scope["headers"]
    request_id: str | None = request.scope.get("state", {}).get("request_id")
    if request_id is None:
        return tuple(headers)
    name = REQUEST_ID.encode()
    return (*((key, value) for key, value in headers if key != name), (name, request_id.encode()))


async def keep_returning_memory() -> None:
    """Return freed memory to the operating system every `PULSE_EVERY_S` seconds, as replicas do."""
    while True:
        await asyncio.to_thread(return_freed_memory)
        await asyncio.sleep(PULSE_EVERY_S)


class HttpServer(uvicorn.Server):
    """uvicorn's server without signal handlers: in an actor, Ray handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_http(
    app: ASGIApp, host: str, port: int, *, body_timeout_s: float, **settings: Any
) -> asyncio.Task[None]:
    """Serve an app at an address, with at most `MAX_CONNECTIONS` connections. Returns the server's task once the
    server listens.

    Args:
        app: the ASGI app.
        host, port: the address.
        body_timeout_s: seconds for the head of a request to come. The app limits the time for the body.
        settings: further settings of uvicorn.

    Raises:
        StartupError: the address cannot be used.
    """
    listener = bind(host, port)
    limits = ConnectionLimits(connections=allow_open_files(MAX_CONNECTIONS), receive_s=body_timeout_s)
    find_lost_peers(listener, limits.send_s)
    config = Config(app, limits, lifespan="off", ws="none", log_config=None, access_log=False, **settings)
    server = HttpServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    return serving


@contextlib.asynccontextmanager
async def no_longer_than(wait_s: float) -> AsyncIterator[None]:
    """Context manager: bounds the wait for a replica.

    Raises:
        ApiError: no replica took the request within `wait_s` seconds.
    """
    try:
        async with asyncio.timeout(wait_s):
            yield
    except TimeoutError:
        raise no_replica() from None


def no_replica() -> ApiError:
    return unavailable("no replica takes requests; one may be on its way", code="no_replica", retry_after_s=5)
