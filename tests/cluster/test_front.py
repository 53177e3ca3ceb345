"""The front's checks, which replicas do not repeat. Replicas are stand-ins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from starlette.types import Message

from cluster.forwarding import Forwarded, Head, Part
from common.server.errors import unavailable
from common.server.http.middleware import RequestIds
from common.server.options import CommonOptions

pytestmark = [pytest.mark.cluster, pytest.mark.anyio]


class Replicas:
    """Stands for Serve's handle: refuses the prompt "no", streams for ever for "long", answers all others.

    Attributes:
        full: names of the replicas that answer 503.
        asked: the replica that each request went to.
        requests: the requests as they went there.
    """

    def __init__(self) -> None:
        self.full: set[str] = set()
        self.asked: list[str] = []
        self.requests: list[Forwarded] = []

    def options(self, **_: Any) -> Replicas:
        return self

    def remote(self, request: Forwarded) -> Reply:
        name = next((name for name in "ab" if name not in request.avoid), "a")  # the router's choice
        self.asked.append(name)
        self.requests.append(request)
        return Reply(self._answer(name, orjson.loads(request.body)["prompt"]))

    async def _answer(self, name: str, prompt: str) -> AsyncIterator[str | list[Part]]:
        yield name
        if name in self.full:
            yield [
                Head(503, ()),
                orjson.dumps(unavailable("full", code="queue_full", retry_after_s=1).body()),
            ]
        elif prompt == "no":
            yield [Head(422, ((b"content-length", b"2"),)), b"{}"]
        else:
            yield [Head(200, ()), b"event: token\n\n"]
            if prompt == "long":
                await asyncio.Event().wait()


class Reply:
    """Stands for Serve's response: an iterator that can be cancelled."""

    def __init__(self, parts: AsyncIterator[str | list[Part]]) -> None:
        self._parts = parts

    def __aiter__(self) -> Reply:
        return self

    async def __anext__(self) -> str | list[Part]:
        return await anext(self._parts)

    def cancel(self) -> None:
        """Do nothing: the test's event loop drops the iterator."""


class Fronted:
    """A front with replicas that are stand-ins."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    async def start(self, **options: Any) -> None:
        from cluster.front import Front  # imported late, because it imports Ray

        plain = Front.__mro__[1]  # without Serve's wrapper, which needs a running cluster
        self._front = plain.__new__(plain)
        await plain.__init__(
            self._front,
            self._replicas,
            CommonOptions(**options).model_dump(),
            wanted=2,
            wait_s=5.0,
            listen_at=None,
        )

    @asynccontextmanager
    async def answering(self, *headers: tuple[bytes, bytes]) -> AsyncIterator[None]:
        """Context manager: keep an endless stream running during the block."""
        begun = asyncio.Event()
        stream = asyncio.create_task(self.ask("long", *headers, begun=begun))
        try:
            await begun.wait()
            yield
        finally:
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)

    async def ask(
        self,
        prompt: str,
        *headers: tuple[bytes, bytes],
        begun: asyncio.Event | None = None,
        by_serve: bool = False,
    ) -> int:
        """Return the status of a request; `begun` is set when its answer begins.

        `by_serve`: the request comes from Ray Serve's own proxy, which gives it no state.
        """
        statuses: list[int] = []
        body = [{"type": "http.request", "body": orjson.dumps({"prompt": prompt}), "more_body": False}]

        async def receive() -> Message:
            if not body:
                await asyncio.Event().wait()
            return body.pop()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
                if begun is not None:
                    begun.set()

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), *headers],
        }
        app = self._front.guarded
        await (app if by_serve else RequestIds(app))(scope, receive, send)
        return statuses[0]


async def test_a_request_that_a_full_replica_refuses_goes_to_another() -> None:
    replicas = Replicas()
    front = Fronted(replicas)
    await front.start()
    replicas.full.add("a")
    assert await front.ask("Once") == 200
    assert replicas.asked == ["a", "b"]
    replicas.full.add("b")
    assert await front.ask("Once") == 503
    replicas.full.clear()
    assert await front.ask("Once") == 200


async def test_hosts_and_sites_are_checked_by_the_front() -> None:
    replicas = Replicas()
    front = Fronted(replicas)
    await front.start()
    assert await front.ask("Once", (b"host", b"elsewhere.example")) == 403
    assert await front.ask("Once", (b"host", b"localhost"), (b"sec-fetch-site", b"cross-site")) == 403
    assert replicas.asked == []
    assert await front.ask("Once", (b"host", b"localhost")) == 200


async def test_a_replica_is_told_a_requests_id_and_whether_the_client_chose_it() -> None:
    replicas = Replicas()
    front = Fronted(replicas)
    await front.start()
    assert await front.ask("Once", (b"x-request-id", b"job-5")) == 200
    assert await front.ask("Once") == 200
    chosen, made_up = replicas.requests
    assert (dict(chosen.headers)[b"x-request-id"], chosen.named) == (b"job-5", True)
    assert len(dict(made_up.headers)[b"x-request-id"]) == 32
    assert not made_up.named


async def test_requests_of_ray_serves_own_proxy_are_answered() -> None:
    replicas = Replicas()
    front = Fronted(replicas)
    await front.start()
    assert await front.ask("Once", (b"x-request-id", b"from-serve"), by_serve=True) == 200
    (forwarded,) = replicas.requests
    assert dict(forwarded.headers)[b"x-request-id"] == b"from-serve"
