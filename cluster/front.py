"""The front: what clients talk to, before the replicas.

```text
client ── HTTP ── Ray's proxy ── front ──┬── replica a
                                         └── replica b
```

Ray's proxy could pass requests to replicas itself, but knows nothing of what they ask for: it routes before the
body has come, it tries nothing twice, and where a replica is lost it cuts the connection. The front has read the
body; it holds an answer's head back until there is a first byte of its body, so that until then another replica can
answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Sequence

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.answer import Answer
from cluster.forwarding import GENERATING, Forwarded, Whole, read_keys, replica_lost
from cluster.merging import HEALTH, MERGES, health, merge
from common.errors import ShuttingDownError
from common.server.bodies import Bodies, says_json
from common.server.errors import ApiError, from_exception, unavailable
from common.server.middleware import ApiKeys, client_of, cors_settings
from common.server.stream import while_connected

logger = logging.getLogger(__name__)

#: Why a replica refuses that is as well as the others: they may have room.
BUSY = {"queue_full", "shutting_down", "engine_stuck"}

#: What it says when its engine has ended, maybe of this very request: that is tried on one other, not on all.
DEAD = "engine_dead"

#: Routes that a single server, too, answers 503 once it drains. The others say how it is.
REFUSED_WHILE_DRAINING = GENERATING | {"/ready", "/reset_prefix_cache"}

#: For all replicas to say how they are: whoever asks for that is impatient.
HEALTH_WAIT_S = 5.0


class ReplicaLostError(Exception):
    """A replica will not answer any more."""


#: What is raised where a replica is gone, or Serve has none.
LOST = (ReplicaLostError, RayError, RayServeException)


def pass_through() -> Router:
    """The ASGI app of a front, for which every path is the same; Serve makes it in the front's own process."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        front: Front = serve.get_replica_context().servable_object
        await front.guarded(scope, receive, send)

    return Router(default=app)


@serve.ingress(pass_through)
class Front:
    """Passes requests on.

    Args:
        replicas: of the deployment that computes.
        wanted: how many of them there should be, at the least.
        wait_s: for a replica, where there is none.
        body_timeout_s: from the head of a request to the end of its body.
        api_keys, cors_origins: as for `create_app`. Keys are checked here, too, before a body is read.

    Attributes:
        guarded: the ASGI app that answers requests which have shown their keys.
    """

    def __init__(
        self,
        replicas: DeploymentHandle,
        *,
        wanted: int,
        wait_s: float,
        body_timeout_s: float,
        api_keys: Sequence[str],
        cors_origins: Sequence[str],
    ) -> None:
        self._replicas = replicas
        self._streams = replicas.options(stream=True, method_name="stream")
        self._wanted = wanted
        self._wait_s = wait_s
        self._bodies = Bodies(body_timeout_s)
        self._known: set[str] = set()  # names of replicas that have answered, and should still be there
        self._draining = False
        self._running = 0
        self.guarded: ASGIApp = self._answer
        if api_keys:
            self.guarded = ApiKeys(self.guarded, api_keys)
        if cors_origins:
            self.guarded = CORSMiddleware(self.guarded, **cors_settings(cors_origins))

    # ------------------------------------------------------------------ the end (asked by the command)

    def stop_accepting(self) -> None:
        """From now on, new requests are told that the server is shutting down; so are those still being sent."""
        self._draining = True
        self._bodies.give_up()

    def num_running(self) -> int:
        """Requests that have not been answered to their end."""
        return self._running

    # ------------------------------------------------------------------ requests

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, to its end."""
        request = Request(scope, receive)
        answer = Answer(send, request.url.path)
        self._running += 1
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
            pass  # the replica has heard of it when its stream was closed
        finally:
            self._running -= 1

    async def _read(self, request: Request) -> Forwarded:
        """Read a request. A body that is not JSON is left unread: the replica refuses it, or does not want it.

        Raises:
            ApiError: as `Bodies.read_json`.
        """
        body = await self._bodies.read_json(request) if says_json(request) else b""
        path = request.url.path
        # Bodies are merged for HEAD, too; the server in front leaves the merged one out.
        is_merged = path == HEALTH or path in MERGES
        return Forwarded(
            method="GET" if request.method == "HEAD" and is_merged else request.method,
            path=path,
            query=request.scope["query_string"],
            headers=tuple(request.scope["headers"]),
            body=body,
            client=client_of(request.scope),
            keys=read_keys(path, body),
        )

    async def _reply(self, request: Forwarded, answer: Answer) -> None:
        """Send the answer of one replica, or one that is made of all replicas'."""
        if request.path == HEALTH:
            replies = await self._ask_all(request, min(self._wait_s, HEALTH_WAIT_S))
            head, body = health(replies, wanted=self._wanted, known=self._known, draining=self._draining)
        elif request.path in MERGES:
            head, body = merge(request.path, await self._ask_all(request, self._wait_s))
        else:
            await self._pass_on(request, answer)
            return
        await answer.add(head)
        await answer.add(body)
        await answer.finish()

    async def _pass_on(self, request: Forwarded, answer: Answer) -> None:
        """The answer of the first replica that has one.

        A replica that is busy is passed over, until all have said so. One that is lost is replaced once, if the
        client was not sent a byte.
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
        """Pass on what one replica answers; its name is put into `tried`. False: it is busy, another may not be.

        Raises:
            ApiError: for so long there has been no replica.
            ReplicaLostError, RayError, RayServeException: it is lost.
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
            if refusal in BUSY and tried[0] not in request.avoid:
                return False
            await answer.finish()
            return True
        finally:
            reply.cancel()  # harmless for one that is done

    async def _ask_all(self, request: Forwarded, wait_s: float) -> dict[str, Whole]:
        """Return the answer of every replica, by its name. A replica that is lost has none.

        Raises:
            ApiError: there is no replica.
        """
        async with no_longer_than(wait_s):
            replies = await self._replicas.broadcast("whole", request).results_async(return_exceptions=True)
        for reply in replies:
            if isinstance(reply, Exception) and not isinstance(reply, LOST):
                logger.warning("a replica could not answer %s: %r", request.path, reply)
        answers = {name: (head, body) for name, head, body in (r for r in replies if isinstance(r, tuple))}
        if not answers:
            raise no_replica()
        if len(answers) >= self._wanted:
            self._known.clear()  # whoever is not among these was replaced, or is not needed any more
        self._known.update(answers)
        return answers


@contextlib.asynccontextmanager
async def no_longer_than(wait_s: float) -> AsyncIterator[None]:
    """Wait for a replica for so long.

    Raises:
        ApiError: no replica has taken the request in that time.
    """
    try:
        async with asyncio.timeout(wait_s):
            yield
    except TimeoutError:
        raise no_replica() from None


def no_replica() -> ApiError:
    return unavailable("no replica takes requests; one may be on its way", code="no_replica", retry_after_s=5)
