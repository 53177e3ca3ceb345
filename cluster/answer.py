"""What a client has been sent of its answer, and how to end it where the replica is lost."""

from __future__ import annotations

from collections.abc import Iterator

import orjson
from starlette.types import Send

from cluster.forwarding import GENERATING, Head, Part
from common.server.errors import ApiError, status_at
from common.server.transport import json_response
from common.server.wire.format import event
from common.server.wire.plain import DONE

UNAVAILABLE = 503


class Answer:
    """One client's answer.

    Attributes:
        begun: whether a byte was sent; until then the request can be tried elsewhere.
        choices: how many it has, each with an end of its own.
    """

    def __init__(self, send: Send, path: str) -> None:
        self._send = send
        self._path = path
        self._head: Head | None = None
        self._refusal = b""  # the body of an answer that says: not now
        self._ended: set[int] = set()  # choices
        self._done = False  # whether [DONE] was sent
        self.begun = False
        self.choices = 1

    @property
    def _streams(self) -> bool:
        return self._head is not None and any(
            name == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in self._head.headers
        )

    async def add(self, part: Part) -> None:
        """Send what the replica has sent. A head waits for the first byte of its body, and a refusal for now until
        `finish`: another replica may not refuse."""
        if isinstance(part, Head):
            self._head, self._refusal = part, b""
            return
        assert self._head is not None, "an answer begins with its head"
        if self._head.status == UNAVAILABLE:
            self._refusal += part
            return
        await self._begin()
        self._ended |= set(ended_choices(part))
        self._done |= part.endswith(DONE)
        await self._send({"type": "http.response.body", "body": part, "more_body": True})

    @property
    def refusal(self) -> str | None:
        """The code of a refusal for now, if that is what came."""
        return str(orjson.loads(self._refusal)["error"]["code"]) if self._refusal else None

    async def finish(self) -> None:
        """That was all of it."""
        await self._begin()
        await self._send({"type": "http.response.body", "body": self._refusal, "more_body": False})

    async def _begin(self) -> None:
        if self.begun:
            return
        assert self._head is not None, "an answer begins with its head"
        self.begun = True
        # Ray's proxy, too, says which request this was: the replica was given the same id.
        headers = [(name, value) for name, value in self._head.headers if name != b"x-request-id"]
        await self._send({"type": "http.response.start", "status": self._head.status, "headers": headers})

    async def fail(self, error: ApiError) -> None:
        """End the answer with an error: as one, if nothing was sent, or as what is left of the stream."""
        if not self.begun:
            response = json_response(error.body(), status_at(self._path, error), error.headers)
            await self.add(Head(response.status_code, tuple(response.raw_headers)))
            await self.add(bytes(response.body))
        elif self._streams and not self._done:
            await self.add(b"".join(self._last_events(error)))
        await self.finish()

    def _last_events(self, error: ApiError) -> Iterator[bytes]:
        """What each choice that has not ended is owed, in its route's format."""
        if not GENERATING[self._path]:
            yield event(error.body()) + DONE
            return
        for index in sorted(set(range(self.choices)) - self._ended):
            choice = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
            yield event(error.body() | ({"choices": [choice]} if self.choices > 1 else {}), "error")


def ended_choices(events: bytes) -> Iterator[int]:
    """The choices that end in these events, if the events have names. JSON has no raw line ends."""
    for each in events.split(b"\n\n"):
        if each.startswith((b"event: done\n", b"event: error\n")):
            data = orjson.loads(each.partition(b"\ndata: ")[2])
            yield data["choices"][0]["index"] if "choices" in data else 0
