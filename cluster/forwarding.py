"""The messages between the front and a replica. This module does not import Ray.

```text
client ── HTTP ──> front: Forwarded ── Ray ──> replica: the phase's app, in this process
       <─────────  [Head, b"…", Ended]  <────  its ASGI messages, those that are ready together
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
from common.server.api.bodies import REFERENCES
from common.server.api.stream import STREAM_ENDS
from common.server.errors import ApiError, unavailable

logger = logging.getLogger(__name__)

#: Routes that generate text: their requests have a prompt.
GENERATING = frozenset(
    {
        "/v1/completions",
        "/openai/v1/completions",
        "/v1/chat/completions",
        "/openai/v1/chat/completions",
        "/v1/responses",
        "/openai/v1/responses",
        "/v1/messages",
    }
)


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A request as the front received it, and the fields that the router reads.

    Attributes:
        named: whether the client chose the request's id.
        client: the client's address.
        keys: the keys of the prompt's beginning (`cluster.policy.prefix_keys`).
        holder: the name of the replica that has the stored response which the request refers to; empty if it refers
            to none.
        avoid: names of the replicas that refused the request or were lost while they computed it.
    """

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    named: bool = True
    client: str | None = None
    keys: tuple[int, ...] = ()
    holder: str = ""
    avoid: tuple[str, ...] = ()

    def scope(self) -> dict[str, Any]:
        """Return the request as an ASGI scope."""
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
            "client": None if self.client is None else (self.client, 0),
            "server": None,
            "state": {"named": self.named},
            "extensions": {STREAM_ENDS: {"error": replica_lost()}},
        }


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of an answer.

    Attributes:
        ends: for a stream, the events that the front ends it with if the replica is lost: an error event of each
            choice, then the stream's last event (`common.server.api.stream`).
    """

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    ends: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """Indices into the stream's `Head.ends`: the events that the replica itself has sent by now."""

    ends: frozenset[int]


#: A part of an answer: its head, then bytes of its body. In a stream, bytes are whole events, and `Ended` says
#: which final events the bytes so far contain.
Part = Head | bytes | Ended

#: A whole answer: its head and its body.
Whole = tuple[Head, bytes]


def replica_lost() -> ApiError:
    """Return the error of a request whose replica was lost."""
    return unavailable(
        "the replica that computed this was lost; send the request again",
        code="replica_lost",
        retry_after_s=1,
    )


def read_keys(path: str, body: bytes) -> tuple[int, ...]:
    """Return the keys of a request's first prompt; () if its route has no prompts or its body is invalid.

    A conversation's keys are computed from its messages or items as they were sent, because its next turn begins
    with the same messages or items.
    """
    if path not in GENERATING:
        return ()
    try:
        sent = orjson.loads(body)
        prompt, salt = sent.get("messages", sent.get("prompt")), sent.get("cache_salt") or ""
        if "input" in sent:
            prompt = {"instructions": sent.get("instructions"), "input": sent["input"]}
        if "system" in sent:
            prompt = {"system": sent["system"], "messages": prompt}
        several = isinstance(prompt, list) and "messages" not in sent and not isinstance(prompt[0], int)
        first = prompt[0] if several else prompt
        text = first.encode() if isinstance(first, str) else orjson.dumps(first)
        return tuple(prefix_keys(text, salt.encode()))
    except (ValueError, TypeError, AttributeError, LookupError):
        return ()


def read_holder(path: str, body: bytes) -> str:
    """Return the name of the replica that has the stored response which a request refers to, by its path or body.

    Returns an empty text if it refers to none. The name is a part of the ids of a replica's responses and items.
    """
    _, responses, rest = path.partition("/v1/responses/")
    named: Any = rest.partition("/")[0]
    if not responses and any(word in body for word in REFERENCES):
        with contextlib.suppress(ValueError, TypeError, AttributeError, LookupError):
            sent = orjson.loads(body)
            items = () if isinstance(sent["input"], str) else sent["input"]
            referred = (item["id"] for item in items if item.get("type") == "item_reference")
            named = sent.get("previous_response_id") or next(referred, "")
    parts = named.split("_") if isinstance(named, str) else []
    return parts[1] if len(parts) > 2 else ""


#: Most parts of an answer that may wait for the front. If so many wait, the app's `send` blocks.
MOST_READY = 16


class LocalCall:
    """One request to an ASGI app in this process."""

    def __init__(self, app: ASGIApp, request: Forwarded) -> None:
        self._app = app
        self._request = request
        self._sent: asyncio.Queue[Part | None] = asyncio.Queue()  # None: the end
        self._room = asyncio.Event()  # set when a part was taken, or the client has left
        self._left = asyncio.Event()
        self._body = [request.body]
        self._ended: frozenset[int] = frozenset()

    async def answer(self) -> AsyncGenerator[list[Part], None]:
        """Yield lists of the parts that the app sends; each list has all parts that are ready.

        If the generator is closed early, the app is told that its client has left.
        """
        running = asyncio.create_task(self._run())
        try:
            ready: list[Part] = []
            while (part := await self._sent.get()) is not None:
                self._room.set()
                ready.append(part)
                if self._sent.empty():
                    yield ready
                    ready = []
            if ready:
                yield ready
        finally:
            self._left.set()
            self._room.set()
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
            self._sent.put_nowait(Head(message["status"], headers, message.get("ends", ())))
        elif message.get("body"):
            while self._sent.qsize() >= MOST_READY and not self._left.is_set():
                self._room.clear()
                await self._room.wait()
            self._sent.put_nowait(message["body"])
            ended = message.get("ended", self._ended)
            if ended != self._ended:
                self._ended = ended
                self._sent.put_nowait(Ended(ended))


async def collect(app: ASGIApp, request: Forwarded) -> Whole:
    """Return the whole answer of an app: head and body."""
    parts: list[Part] = []
    async with contextlib.aclosing(LocalCall(app, request).answer()) as answer:
        async for ready in answer:
            parts += ready
    head, *body = parts
    assert isinstance(head, Head), "an answer begins with its head"
    return head, b"".join(part for part in body if isinstance(part, bytes))
