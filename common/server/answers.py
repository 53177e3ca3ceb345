"""Outputs of the engine to an answer: as they come, into a stream's events, or to their end, for a JSON answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, TypeVar

from common.request import StepOutput
from common.server.errors import from_exception
from common.server.wire.format import Answer, WireFormat
from common.worker import RequestStream

T = TypeVar("T")


async def stream_events(
    answer: Answer, streams: Sequence[RequestStream], wire: WireFormat
) -> AsyncIterator[bytes]:
    """Every choice's outputs as they come, in a wire format."""
    async with contextlib.aclosing(interleave(streams)) as outputs:
        async for index, output in outputs:
            choice = answer.choices[index]
            choice.add(output)
            yield wire.events(choice, output)
    closing = wire.closing()
    if closing:
        yield closing


async def collect(answer: Answer, streams: Sequence[RequestStream], wire: WireFormat) -> dict[str, Any]:
    """Every choice to its end: the JSON answer.

    Raises:
        ApiError: a choice failed, and the answer with it.
    """
    said: list[list[StepOutput]] = [[] for _ in streams]
    async with contextlib.aclosing(interleave(streams)) as outputs:
        async for index, output in outputs:
            if output.error is not None:
                raise from_exception(output.error)
            answer.choices[index].add(output)
            said[index].append(output)
    return wire.whole(said)


async def interleave(streams: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all streams as they come, each with its stream's number. Close it when you stop early."""
    if len(streams) == 1:  # the ordinary request: its items need neither a task nor a second queue
        async for only in streams[0]:
            yield 0, only
        return
    arrived: asyncio.Queue[tuple[int, T] | None] = asyncio.Queue()

    async def forward(number: int, stream: AsyncIterator[T]) -> None:
        async for item in stream:
            arrived.put_nowait((number, item))
        arrived.put_nowait(None)

    tasks = [asyncio.create_task(forward(number, stream)) for number, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            item = await arrived.get()
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
