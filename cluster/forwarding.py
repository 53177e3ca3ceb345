"""What goes from the front to a replica and back. No Ray, and nothing that knows where either of them is.

```text
client ── HTTP ──> front: Forwarded ── Ray ──> replica: the phase's app, in this process
       <─────────  [Head, b"…", b"…"]  <─────  its ASGI messages, those that are ready together
```
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.types import ASGIApp, Message

from cluster.policy import prefix_keys

logger = logging.getLogger(__name__)

#: Routes that make text, and whether their streams have named events (`common.server.wire.named`).
GENERATING = {
    "/v1/completions": True,
    "/openai/v1/completions": False,
    "/v1/chat/completions": False,
    "/openai/v1/chat/completions": False,
}


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A request as it came, and what the router goes by.

    Attributes:
        keys: of its prompt's beginning (`cluster.policy.prefix_keys`).
        choices: how many the answer has, each with an end of its own.
        avoid: replicas that have refused it or were lost with it.
    """

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    keys: tuple[int, ...] = ()
    choices: int = 1
    avoid: tuple[str, ...] = ()

    def scope(self) -> dict[str, Any]:
        """The same as ASGI has it."""
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": list(self.headers),
            "client": None,
            "server": None,
            "state": {},
        }


@dataclass(frozen=True, slots=True)
class Head:
    """How an answer begins."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]


#: Of an answer on its way: its head, then bytes of its body.
Part = Head | bytes


def read_prompt(path: str, body: bytes) -> tuple[tuple[int, ...], int]:
    """The keys of a request's prompt and how many choices it has. What is wrong with a body is the replica's to
    say: it has no keys here.

    A conversation's key is its messages as they were sent. Its next turn begins with the same ones.
    """
    if path not in GENERATING:
        return (), 1
    try:
        sent = orjson.loads(body)
        prompt, salt = sent.get("messages", sent.get("prompt")), sent.get("cache_salt") or ""
        several = isinstance(prompt, list) and "messages" not in sent and not isinstance(prompt[0], int)
        prompts = prompt if several else [prompt]
        text = prompts[0].encode() if isinstance(prompts[0], str) else orjson.dumps(prompts[0])
        choices = len(prompts) * (sent.get("n") or 1)
        return tuple(prefix_keys(text, salt.encode())), int(choices)
    except (ValueError, TypeError, AttributeError, LookupError):
        return (), 1


class LocalCall:
    """One request to an ASGI app of this process."""

    def __init__(self, app: ASGIApp, request: Forwarded) -> None:
        self._app = app
        self._request = request
        self._sent: asyncio.Queue[Part | None] = asyncio.Queue()  # None: that was all
        self._left = asyncio.Event()
        self._body = [request.body]

    async def answer(self) -> AsyncGenerator[list[Part], None]:
        """What the app sends, a list of what is ready at a time. Closed early, the app's client has left."""
        running = asyncio.create_task(self._run())
        try:
            ready: list[Part] = []
            while (part := await self._sent.get()) is not None:
                ready.append(part)
                if self._sent.empty():
                    yield ready
                    ready = []
            if ready:
                yield ready
        finally:
            self._left.set()
            await asyncio.shield(asyncio.gather(running, return_exceptions=True))

    async def _run(self) -> None:
        try:
            await self._app(self._request.scope(), self._receive, self._send)
        except Exception:  # the app has answered 500 before it raised this
            logger.exception("the app failed on a request")
        finally:
            self._sent.put_nowait(None)

    async def _receive(self) -> Message:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = tuple((bytes(name), bytes(value)) for name, value in message["headers"])
            self._sent.put_nowait(Head(message["status"], headers))
        elif message.get("body"):
            self._sent.put_nowait(message["body"])


async def collect(app: ASGIApp, request: Forwarded) -> tuple[Head, bytes]:
    """The whole answer of an app."""
    parts: list[Part] = []
    async with contextlib.aclosing(LocalCall(app, request).answer()) as answer:
        async for ready in answer:
            parts += ready
    head, *body = parts
    assert isinstance(head, Head), "an answer begins with its head"
    return head, b"".join(part for part in body if isinstance(part, bytes))
