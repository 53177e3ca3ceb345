"""The checks of the front, which replicas do not repeat."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send

from common.server.middleware import PaceRefusals
from common.server.options import CommonOptions

pytestmark = pytest.mark.cluster

EXTRA = 8  # refusals beyond the burst


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds for which the code under test has slept. None of them pass."""
    seconds: list[float] = []

    async def sleep(delay: float) -> None:
        seconds.append(delay)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return seconds


def flood(options: CommonOptions, *, app_status: int, computing: bool = True) -> set[int]:
    """The statuses of so many requests without a key, one after the other, that some wait if they are refused."""
    from cluster.front import guarded  # here, since it imports Ray

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": app_status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def run() -> set[int]:
        statuses: list[int] = []

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        front = guarded(app, options, is_computing=lambda: computing)
        for _ in range(PaceRefusals.BURST + EXTRA):
            scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
            await front(scope, receive, send)
        return set(statuses)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("keys", "app_status", "status"),
    [(["a-key"], 200, 401), ([], 422, 422)],
    ids=["refused by the front", "refused by a replica"],
)
def test_refusals_are_paced_by_the_front(
    keys: list[str], app_status: int, status: int, slept: list[float]
) -> None:
    assert flood(CommonOptions(api_key=keys), app_status=app_status) == {status}
    assert len(slept) == EXTRA


def test_answers_and_refusals_of_an_idle_cluster_leave_at_once(slept: list[float]) -> None:
    assert flood(CommonOptions(), app_status=200) == {200}
    assert flood(CommonOptions(), app_status=422, computing=False) == {422}
    assert slept == []
