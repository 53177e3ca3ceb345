"""Answers: the engine's outputs as they come, as a stream's events, or to their end, as one JSON object."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TypeVar

import orjson

from common.request import StepOutput
from common.server.errors import from_exception
from common.server.intake import Lane
from common.server.wire.format import Answer, Choice, WireFormat, is_first
from common.worker import RequestStream

T = TypeVar("T")

#: Entries of an answer (tokens, and tokens named in log-probabilities) that are encoded on the event loop: a
#: millisecond's work. More are encoded in a thread.
LARGE_ANSWER = 512


async def stream_events(
    answer: Answer, streams: Sequence[RequestStream], wire: WireFormat, encoding: Lane
) -> AsyncIterator[bytes]:
    """Yield the events of every choice's outputs, in a wire format.

    Args:
        answer: the choices.
        streams: the engine's outputs for each choice.
        wire: encodes the events.
        encoding: threads for large events.
    """
    async with contextlib.aclosing(outputs_of(answer, streams)) as outputs:
        async for choice, output in outputs:
            if is_first(output) and _prompt_entries(answer, choice) > LARGE_ANSWER:
                events = await encoding.run(functools.partial(wire.events, choice, output))
            else:
                events = wire.events(choice, output)
            choice.ended = output.finished
            yield events
    closing = wire.closing()
    if closing:
        yield closing


async def collect(
    answer: Answer, streams: Sequence[RequestStream], wire: WireFormat, encoding: Lane
) -> bytes:
    """Return the JSON answer once every choice has ended.

    Args:
        answer: the choices.
        streams: the engine's outputs for each choice.
        wire: makes the answer of them.
        encoding: threads for large answers.

    Raises:
        ApiError: a choice failed, and the answer with it.
    """
    said: list[list[StepOutput]] = [[] for _ in streams]
    async with contextlib.aclosing(outputs_of(answer, streams)) as outputs:
        async for choice, output in outputs:
            if output.error is not None:
                raise from_exception(output.error)
            said[choice.index].append(output)

    def encode() -> bytes:
        return orjson.dumps(wire.whole(said))

    entries = sum(_prompt_entries(answer, choice) for choice in answer.choices)
    entries += sum(len(outputs) * _entries_per_token(outputs[0]) for outputs in said)
    return await encoding.run(encode) if entries > LARGE_ANSWER else encode()


def _prompt_entries(answer: Answer, choice: Choice) -> int:
    """Return how many entries a choice's first output has about its prompt."""
    shown, tokens = answer.shown, len(choice.prompt.token_ids)
    named = [shown.prompt_logprobs, shown.logprobs if shown.echo else None]
    return tokens * (shown.token_ids + sum(1 + count for count in named if count is not None))


def _entries_per_token(output: StepOutput) -> int:
    return 1 if output.logprobs is None else 1 + len(output.logprobs.top)


async def outputs_of(
    answer: Answer, streams: Sequence[RequestStream]
) -> AsyncGenerator[tuple[Choice, StepOutput], None]:
    """Yield the outputs of all choices as they come, each added to its choice. Close it when you stop early.

    Only one choice of a prompt has the prompt's tokens scored, and every choice may show the scores. Outputs of the
    other choices are held back until that choice's first output.
    """
    held_back: list[tuple[Choice, StepOutput]] = []
    async with contextlib.aclosing(interleave(streams)) as outputs:
        async for index, output in outputs:
            choice = answer.choices[index]
            prompt = choice.prompt
            ready = [(choice, output)]
            if answer.shown.scores_prompts and not prompt.is_scored:
                if not choice.scores_prompt:
                    held_back += ready
                    continue
                prompt.is_scored, prompt.scores = True, output.prompt_logprobs
                ready += [each for each in held_back if each[0].prompt is prompt]
                held_back = [each for each in held_back if each[0].prompt is not prompt]
            for of_choice, waiting in ready:
                yield of_choice, answer.add(of_choice, waiting)


async def interleave(streams: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield the items of all streams as they come, each with its stream's number. Close it when you stop early."""
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
