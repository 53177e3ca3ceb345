"""A request on its way from the front to a replica, and its answer's way back. This module does not import Ray.

```text
client ── HTTP ──> front: Forwarded ── Ray ──> replica: the phase's app, in this process
       <────────────  ASGI messages  <───────  those that are ready together
```
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.types import ASGIApp, Message

from cluster.policy import prefix_keys
from common.server.api.bodies import REFERENCES
from common.server.api.stream import LOST_STREAM
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

#: Most messages of an answer that may wait for the front. If so many wait, the app's `send` blocks.
MOST_READY = 16

#: A whole answer: its first ASGI message, with status and headers, and its body.
Whole = tuple[Message, bytes]


#: The fields of an ASGI scope that a replica gets. The others are objects of the front's process.
PASSED = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path"),
    *("headers", "client", "server"),
)


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A request as the front received it, and the fields that the router reads.

    Attributes:
        scope: the fields `PASSED` of its ASGI scope.
        keys: the keys of the prompt's beginning (`cluster.policy.prefix_keys`).
        holder: the name of the replica that has the stored response which the request refers to; empty if it refers
            to none.
        avoid: names of the replicas that refused the request or were lost while they computed it.
    """

    scope: dict[str, Any]
    body: bytes
    keys: tuple[int, ...] = ()
    holder: str = ""
    avoid: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return str(self.scope["path"])


def replica_lost() -> ApiError:
    """Return the error of a request whose replica was lost."""
    return unavailable(
        "the replica that computed this was lost; send the request again",
        code="replica_lost",
        retry_after_s=1,
    )


# ---------------------------------------------------------------------- what the router reads


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
    rest = path.partition("/v1/responses/")[2]
    named: Any = rest.partition("/")[0]
    if rest in ("", "input_tokens") and any(word in body for word in REFERENCES):
        with contextlib.suppress(ValueError, TypeError, AttributeError, LookupError):
            sent = orjson.loads(body)
            items = () if isinstance(sent["input"], str) else sent["input"]
            referred = (item["id"] for item in items if item.get("type") == "item_reference")
            named = sent.get("previous_response_id") or next(referred, "")
    parts = named.split("_") if isinstance(named, str) else []
    return parts[1] if len(parts) > 2 else ""


# ---------------------------------------------------------------------- in the replica


async def call(app: ASGIApp, request: Forwarded) -> AsyncGenerator[list[Message], None]:
    """Send a request to an ASGI app of this process. Yields lists of its messages: all that are ready.

    The app is asked for the end of a stream, in case it is lost. If the generator is closed early, the app
    is told that its client has left.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue(MOST_READY)  # None: the end
    left = asyncio.Event()
    body = [request.body]

    async def receive() -> Message:
        if body:
            return {"type": "http.request", "body": body.pop(), "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message | None) -> None:
        if not left.is_set():
            await sent.put(message)

    async def run() -> None:
        try:
            await app(
                {**request.scope, "extensions": {LOST_STREAM: {"error": replica_lost()}}}, receive, send
            )
        except Exception:  # the app has answered 500 before it raised this
            logger.exception("the app failed on a request")
        await send(None)

    running = asyncio.create_task(run())
    try:
        while (message := await sent.get()) is not None:
            ready = [message]
            while not sent.empty() and (message := sent.get_nowait()) is not None:
                ready.append(message)
            yield ready
            if message is None:
                break
    finally:
        left.set()
        while not sent.empty():  # a `send` that waits for room goes on
            sent.get_nowait()
        await asyncio.shield(running)


async def collect(app: ASGIApp, request: Forwarded) -> Whole:
    """Return the whole answer of an app."""
    async with contextlib.aclosing(call(app, request)) as answer:
        start, *rest = [message async for ready in answer for message in ready]
    return start, b"".join(map(body_of, rest))


def body_of(message: Mapping[str, Any]) -> bytes:
    """Return the part of an answer's body that an ASGI message has; none for the first message."""
    body: bytes = message.get("body", b"")
    return body
