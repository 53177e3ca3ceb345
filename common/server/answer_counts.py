"""A count of HTTP answers by their status and by the code of their error."""

from __future__ import annotations

from collections import Counter

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class AnswerCounts:
    """Counts answers.

    Attributes:
        counts: how many there were, by status and error code; the code of an answer without an error is "".
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[int, str]] = Counter()

    def add(self, status: int, reason: str) -> None:
        self.counts[status, reason] += 1


class CountAnswers:
    """Middleware: counts every answer of the app, refusals of other middleware included.

    An answer that is an error counts when its body begins, where its code is.
    """

    def __init__(self, app: ASGIApp, counts: AnswerCounts) -> None:
        self.app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 0
        counted = False

        async def send_and_count(message: Message) -> None:
            nonlocal status, counted
            if message["type"] == "http.response.start":
                status = message["status"]
            if status < 400 or message["type"] == "http.response.body":
                if not counted:
                    self._counts.add(status, error_code(message["body"]) if status >= 400 else "")
                counted = True
            await send(message)

        try:
            await self.app(scope, receive, send_and_count)
        except Exception:
            if not counted:  # whoever called the app answers this
                self._counts.add(500, "internal_error")
            raise


def error_code(body: bytes) -> str:
    """Return the code in an error's body; "" for an answer that is not one of the server's own errors."""
    try:
        return str(orjson.loads(body)["error"]["code"])
    except (ValueError, TypeError, LookupError):
        return ""
