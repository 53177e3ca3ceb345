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
from collections.abc import AsyncIterator

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from cluster.answer import Answer
from cluster.forwarding import Forwarded, Head, read_prompt
from cluster.merging import MERGES, merge
from common.errors import ShuttingDownError
from common.server.errors import ApiError, from_exception, unavailable
from common.server.schemas.parsing import MAX_BODY_BYTES
from common.server.transport import while_connected

#: Why a replica refuses that is as well as the others: they may have room.
BUSY = {"queue_full", "shutting_down"}

#: What it says when its engine has ended, maybe of this very request: that is tried on one other, not on all.
DEAD = "engine_dead"


class ReplicaLostError(Exception):
    """A replica will not answer any more."""


#: What is raised where a replica is gone, or Serve has none.
LOST = (ReplicaLostError, RayError, RayServeException)


def pass_through() -> Router:
    """The ASGI app of a front, for which every path is the same; Serve makes it in the front's own process."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        front: Front = serve.get_replica_context().servable_object
        await front.answer(Request(scope, receive), send)

    return Router(default=app)


@serve.ingress(pass_through)
class Front:
    """Passes requests on.

    Args:
        replicas: of the deployment that computes.
        wait_s: for a replica, where there is none.
    """

    def __init__(self, replicas: DeploymentHandle, wait_s: float) -> None:
        self._replicas = replicas
        self._streams = replicas.options(stream=True, method_name="stream")
        self._wait_s = wait_s
        self._draining = False
        self._running = 0

    # ------------------------------------------------------------------ the end (asked by the command)

    def stop_accepting(self) -> None:
        """From now on, new requests are told that the server is shutting down."""
        self._draining = True

    def num_running(self) -> int:
        """Requests that have not been answered to their end."""
        return self._running

    # ------------------------------------------------------------------ requests

    async def answer(self, request: Request, send: Send) -> None:
        """Answer one request, to its end."""
        answer = Answer(send, request.url.path)
        self._running += 1
        try:
            if self._draining:
                raise from_exception(ShuttingDownError("the cluster is shutting down"))
            forwarded = await read(request)
            answer.choices = forwarded.choices
            if forwarded.path in MERGES:
                work = self._ask_all(forwarded, answer)
            else:
                work = self._pass_on(forwarded, answer)
            await while_connected(request.receive, work)
        except ApiError as error:
            await answer.fail(error)
        except LOST:
            await answer.fail(replica_lost())
        except ClientDisconnect:
            pass  # the replica has heard of it when its stream was closed
        finally:
            self._running -= 1

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
            async with self._no_longer_than_it_may_take():
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

    async def _ask_all(self, request: Forwarded, answer: Answer) -> None:
        """One answer of all replicas; where one refuses, that is the answer."""
        async with self._no_longer_than_it_may_take():
            said = await self._replicas.broadcast("whole", request).results_async()
        if not said:
            raise no_replica()
        head, body = next(((head, body) for _, head, body in said if head.status != 200), (None, b""))
        if head is None:
            body = merge(request.path, {replica: part for replica, _, part in said})
            _, first, _ = said[0]
            named = [(name, value) for name, value in first.headers if name != b"content-length"]
            head = Head(200, (*named, (b"content-length", b"%d" % len(body))))
        await answer.add(head)
        await answer.add(body)
        await answer.finish()

    @contextlib.asynccontextmanager
    async def _no_longer_than_it_may_take(self) -> AsyncIterator[None]:
        """Raises:
        ApiError: no replica has taken the request in that time.
        """
        try:
            async with asyncio.timeout(self._wait_s):
                yield
        except TimeoutError:
            raise no_replica() from None


def replica_lost() -> ApiError:
    return unavailable(
        "the replica that computed this was lost; send the request again",
        code="replica_lost",
        retry_after_s=1,
    )


def no_replica() -> ApiError:
    return unavailable("no replica takes requests; one may be on its way", code="no_replica", retry_after_s=5)


async def read(request: Request) -> Forwarded:
    """A request with its body, which ends soon after it is known to be too long: a replica refuses it then."""
    body = bytearray()
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or int(declared) <= MAX_BODY_BYTES:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                break
    keys, choices = read_prompt(request.url.path, bytes(body))
    return Forwarded(
        method=request.method,
        path=request.url.path,
        query=request.scope["query_string"],
        headers=tuple(request.scope["headers"]),
        body=bytes(body),
        keys=keys,
        choices=choices,
    )
