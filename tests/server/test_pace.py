"""Refusals leave at a bounded rate while the engine computes, and at once while it does not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

import common.server.http.middleware
from common.server.http.middleware import PaceRefusals

pytestmark = pytest.mark.anyio


class Sleeper:
    """Stands for `asyncio` in the middleware alone: servers of other tests sleep in this process, too.

    Attributes:
        now: the time of the event loop's clock, which stands still.
        slept: the seconds of each call of `sleep`.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    def get_running_loop(self) -> Sleeper:
        return self

    def time(self) -> float:
        return self.now


def paced(status: int, monkeypatch: pytest.MonkeyPatch, *, computing: bool = True) -> tuple[Any, Sleeper]:
    sleeper = Sleeper()
    monkeypatch.setattr(common.server.http.middleware, "asyncio", sleeper)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    middleware = PaceRefusals(app, lambda: computing)

    async def ask(path: str = "/v1/completions") -> list[Message]:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        await middleware({"type": "http", "path": path}, None, send)  # type: ignore[arg-type]
        return sent

    return ask, sleeper


async def test_a_flood_of_refusals_waits_and_every_one_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    ask, sleeper = paced(422, monkeypatch)
    for _ in range(PaceRefusals.BURST + 8):
        assert [message["type"] for message in await ask()] == ["http.response.start", "http.response.body"]
    assert sleeper.slept == pytest.approx([(i + 1) / PaceRefusals.PER_S for i in range(8)])


async def test_no_refusal_waits_for_long_and_a_pause_makes_good(monkeypatch: pytest.MonkeyPatch) -> None:
    ask, sleeper = paced(429, monkeypatch)
    for _ in range(PaceRefusals.BURST + 100):
        await ask()
    assert max(sleeper.slept) == PaceRefusals.MOST_S
    sleeper.slept.clear()
    sleeper.now += 60.0
    for _ in range(PaceRefusals.BURST):
        await ask()
    assert sleeper.slept == []


@pytest.mark.parametrize(
    ("status", "computing", "path"),
    [(422, False, "/v1/completions"), (200, True, "/v1/completions"), (503, True, "/health")],
    ids=["idle", "an answer", "health"],
)
async def test_other_answers_do_not_wait(
    status: int, computing: bool, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, sleeper = paced(status, monkeypatch, computing=computing)
    for _ in range(PaceRefusals.BURST + 20):
        await ask(path)
    assert sleeper.slept == []


async def test_only_so_many_wait_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of waiting refusals is bounded, because each may hold a body of two megabytes."""
    ask, sleeper = paced(422, monkeypatch)
    begun: list[float] = []
    release = asyncio.Event()

    async def wait(seconds: float) -> None:
        begun.append(seconds)
        await release.wait()

    monkeypatch.setattr(sleeper, "sleep", wait)
    count = PaceRefusals.BURST + PaceRefusals.MOST_WAITING + 30
    asked = [asyncio.create_task(ask()) for _ in range(count)]
    await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    for _ in range(5):
        await asyncio.wait([asyncio.create_task(asyncio.to_thread(int))])
    assert len(begun) == PaceRefusals.MOST_WAITING
    assert sum(each.done() for each in asked) == count - PaceRefusals.MOST_WAITING
    release.set()
    await asyncio.gather(*asked)
