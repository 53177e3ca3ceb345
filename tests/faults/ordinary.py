"""Ordinary clients, the answers that they must get, and a record of their service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import orjson

from tests.faults.raw_http import Answer, CutError, Target, connect, read_answer
from tests.support.servers import HANG_S

CLIENTS = 20
TOKENS = 64


@dataclass
class Service:
    """The service that a group of clients got.

    Attributes:
        tokens: number of tokens received, those of unfinished answers included.
        answers: number of whole and right answers, by client.
        refused: number of 503 answers. The client waits as long as Retry-After says, and asks again.
        mistakes: wrong texts, other statuses, and cut streams. There should be none.
    """

    tokens: int = 0
    answers: list[int] = field(default_factory=lambda: [0] * CLIENTS)
    refused: int = 0
    mistakes: list[str] = field(default_factory=list)


class OrdinaryClients:
    """Twenty clients. Each streams the answer to a short prompt of its own, again and again."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._requests = [
            target.post(
                "/v1/completions",
                prompt=f"Once upon a time there were {number} foxes",
                max_tokens=TOKENS,
                temperature=0,
                ignore_eos=True,
                stream=True,
            )
            for number in range(CLIENTS)
        ]
        self._alone: list[bytes] = []

    async def learn(self) -> None:
        """Get the right answers, by asking each prompt alone."""
        self._alone = []
        for request in self._requests:
            answer = await self._ask(request, Service())
            assert answer.status == 200, answer
            self._alone.append(text_of(answer))

    async def ask_until_each_has(self, count: int, *, at_least_s: float) -> Service:
        """Let clients ask until each has `count` answers and `at_least_s` seconds are over, or one is wrong."""
        service = Service()
        end = time.monotonic() + at_least_s

        def enough() -> bool:
            served = min(service.answers) >= count and time.monotonic() >= end
            return served or bool(service.mistakes)

        await asyncio.gather(*(self._client(i, service, enough) for i in range(CLIENTS)))
        return service

    async def _client(self, number: int, service: Service, enough: Callable[[], bool]) -> None:
        while not enough():
            try:
                async with asyncio.timeout(HANG_S):
                    answer = await self._ask(self._requests[number], service)
            except (*CutError, TimeoutError) as error:
                service.mistakes.append(f"client {number}: {error!r}")
                await asyncio.sleep(1)
                continue
            if answer.status == 503:
                service.refused += 1
                await asyncio.sleep(int(answer.headers["retry-after"]))
            elif answer.status == 200 and text_of(answer) == self._alone[number]:
                service.answers[number] += 1
            else:
                service.mistakes.append(f"client {number}: {answer.status} {answer.body[-300:]!r}")

    async def _ask(self, request: bytes, service: Service) -> Answer:
        def count(data: bytes) -> None:
            service.tokens += data.count(b"event: token\n")

        async with connect(self._target) as (reader, writer):
            writer.write(request)
            return await read_answer(reader, count)


def text_of(answer: Answer) -> bytes:
    """Return the text of a stream, and the name of its last event."""
    text, name = b"", b""
    for event in answer.body.split(b"\n\n"):
        if event:
            name, _, data = event.removeprefix(b"event: ").partition(b"\ndata: ")
            if name == b"token":
                text += orjson.loads(data)["token"].encode()
    return text + b" | " + name
