"""A client's answer as the front sends it: its start is delayed, so that another replica can take over."""

from __future__ import annotations

import orjson
from starlette.types import Send

from cluster.forwarding import Ended, Head, Part
from common.server.errors import ApiError, error_response

UNAVAILABLE = 503


class Answer:
    """Sends one client's answer, part by part.

    Attributes:
        begun: whether a byte was sent. Until then another replica can answer the request.
    """

    def __init__(self, send: Send, path: str) -> None:
        self._send = send
        self._path = path
        self._head: Head | None = None
        self._refusal = b""  # body of a 503 that is held back
        self._ended: frozenset[int] = frozenset()  # indices into the head's `ends`
        self._left: int | None = None  # bytes of the body to come; None: a stream, whose length is not known
        self._complete = False
        self.begun = False

    async def add(self, part: Part) -> None:
        """Send a part from the replica.

        A head is held back until the first byte of its body comes. A 503 is held back until `finish`, since another
        replica may accept the request.
        """
        if isinstance(part, Head):
            self._head, self._refusal = part, b""
            return
        if isinstance(part, Ended):
            self._ended = part.ends
            return
        assert self._head is not None, "an answer begins with its head"
        if self._head.status == UNAVAILABLE:
            self._refusal += part
            return
        await self._begin()
        await self._send_body(part, ends=self._left is not None and len(part) >= self._left)

    @property
    def refusal(self) -> str | None:
        """The error code of the 503 that is held back; None if there is none."""
        return str(orjson.loads(self._refusal)["error"]["code"]) if self._refusal else None

    async def finish(self) -> None:
        """Send the head or the 503 that is held back, and end the answer."""
        await self._begin()
        if not self._complete:
            await self._send_body(self._refusal, ends=True)

    async def _send_body(self, part: bytes, *, ends: bool) -> None:
        """Send a part of the body.

        The last byte and the answer's end are one message: a client that has the byte may send its next request.
        """
        if self._left is not None:
            self._left -= len(part)
        self._complete = ends
        await self._send({"type": "http.response.body", "body": part, "more_body": not ends})

    async def _begin(self) -> None:
        if self.begun:
            return
        assert self._head is not None, "an answer begins with its head"
        self.begun = True
        # `RequestIds` in the front, or Serve's proxy, adds the id that the replica was given.
        headers = [(name, value) for name, value in self._head.headers if name != b"x-request-id"]
        self._left = next((int(value) for name, value in headers if name == b"content-length"), None)
        await self._send({"type": "http.response.start", "status": self._head.status, "headers": headers})

    async def fail(self, error: ApiError) -> None:
        """End the answer with an error.

        If a stream has begun, send the error event of each choice that has not ended, then the stream's last
        event. The replica supplied these events when the stream began.
        """
        if not self.begun:
            response = error_response(self._path, error, None)
            await self.add(Head(response.status_code, tuple(response.raw_headers)))
            await self.add(bytes(response.body))
        else:
            assert self._head is not None, "an answer begins with its head"
            owed = b"".join(end for i, end in enumerate(self._head.ends) if i not in self._ended)
            if owed:
                await self._send_body(owed, ends=False)
        await self.finish()
