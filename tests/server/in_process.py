"""An app in this process, and clients that call it without a socket: for tests that hold what its threads do."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from common.engine import Engine

MODEL = "m"  # what the tests' apps call their model


class HeldTokenizer:
    """Holds every `encode` of an engine's tokenizer until it is opened."""

    def __init__(self, engine: Engine) -> None:
        self.open = threading.Event()
        self.begun: list[str] = []
        self._encode = engine.tokenizer.encode
        engine.tokenizer.encode = self.encode

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.begun.append(text)
        assert self.open.wait(30)
        return self._encode(text, add_special_tokens=add_special_tokens)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


class Answered:
    """An answer: its status, headers and body."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of an error."""
        return str(self.json()["error"]["code"])


async def post(
    app: FastAPI, path: str, body: dict[str, Any] | bytes, left: asyncio.Event | None = None
) -> Answered:
    """Post a body for a client that stays until `left` is set, and return the answer."""
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    unread = [{"type": "http.request", "body": sent, "more_body": False}]
    stays = left or asyncio.Event()
    answered = Answered()

    async def receive() -> dict[str, Any]:
        if unread:
            return unread.pop()
        await stays.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answered.status = message["status"]
            answered.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            answered.body += message.get("body", b"")

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await app(scope, receive, send)
    return answered


async def complete(app: FastAPI, prompt: Any, left: asyncio.Event | None = None, **fields: Any) -> Answered:
    """Post a completion of two tokens that does not stream."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": False} | fields
    return await post(app, "/v1/completions", body, left)
