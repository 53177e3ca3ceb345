"""An answer as it grows: its prompts and choices, and the way of the engine's outputs into a wire format."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import orjson

from common.request import StepOutput, TokenLogprobs
from common.server.errors import from_exception
from common.server.intake import Lane
from common.server.replies.shapes import Logprobs, Usage
from common.server.requests.generation import GenerationRequest, Shown
from common.text import Tokenizer
from common.worker import RequestStream

T = TypeVar("T")

#: Entries of an answer (tokens, and tokens named in log-probabilities) that are encoded on the event loop: a
#: millisecond's work. More are encoded in a thread.
LARGE_ANSWER = 512


@dataclass(slots=True)
class Prompt:
    """One prompt of a request, with the fields that its choices show of it.

    Attributes:
        token_ids: the prompt, once it has been tokenized.
        echo: the text that its choices begin with; empty unless the request asks for it.
        is_scored: whether the engine is done with scoring it.
        scores: log-probabilities of its tokens from the second on; None where none were asked for or it failed.
    """

    token_ids: Sequence[int] = ()
    echo: str = ""
    is_scored: bool = False
    scores: Sequence[TokenLogprobs] | None = None
    # Made from the scores, once for all choices: the field `prompt_logprobs`, and an echo's log-probabilities.
    logprobs_json: bytes | None = None
    echoed_logprobs: Logprobs | None = None


@dataclass(slots=True)
class Choice:
    """One choice of an answer as it grows.

    Attributes:
        index: prompt × n + j.
        prompt: the prompt it continues, shared with its other choices.
        scores_prompt: whether this choice's request has the prompt scored; one choice of each prompt does.
        text_length: characters so far.
        ended: whether its last event has been made.
    """

    index: int
    prompt: Prompt
    scores_prompt: bool
    text_length: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    ended: bool = False

    def add(self, output: StepOutput) -> None:
        """Count an output of this choice."""
        self.text_length += len(self.leading(output)) + len(output.text_delta)
        self.prompt_tokens, self.completion_tokens = output.prompt_tokens, output.completion_tokens
        self.cached_tokens = output.cached_tokens

    def leading(self, output: StepOutput) -> str:
        """Return the text before an output's own: the echo, before the first output."""
        return self.prompt.echo if is_first(output) else ""

    def usage(self) -> Usage:
        """Return the choice's tokens so far."""
        return _usage(self.prompt_tokens, self.completion_tokens, self.cached_tokens)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: its choices, and the values that all its objects repeat.

    Attributes:
        created: seconds since 1970.
    """

    id: str
    created: int
    model: str
    tokenizer: Tokenizer
    choices: Sequence[Choice]
    shown: Shown = dataclasses.field(default_factory=Shown)

    @classmethod
    def to(cls, wanted: GenerationRequest, answer_id: str, model: str, tokenizer: Tokenizer) -> Answer:
        """Return the answer to a request, without any output yet."""
        prompts = [Prompt() for _ in range(wanted.num_prompts)]
        per_prompt = wanted.choices_per_prompt
        choices = [
            Choice(number * per_prompt + j, prompt, scores_prompt=j == 0)
            for number, prompt in enumerate(prompts)
            for j in range(per_prompt)
        ]
        return cls(answer_id, int(time.time()), model, tokenizer, choices, wanted.shown)

    def show_prompts(self, wanted: GenerationRequest, streams: Sequence[RequestStream]) -> None:
        """Fill in each prompt's token ids and echoed text, if the request asked for them."""
        if self.shown == Shown():
            return
        sent = wanted.prompts(None) if self.shown.echo else ()
        for choice, stream in zip(self.choices, streams, strict=True):
            prompt = choice.prompt
            if prompt.token_ids:  # filled in for an earlier choice
                continue
            prompt.token_ids = stream.request.prompt_token_ids
            if self.shown.echo:
                text = sent[choice.index // wanted.choices_per_prompt]
                as_sent = isinstance(text, str) and wanted.truncate_prompt_tokens is None
                prompt.echo = str(text) if as_sent else self.tokenizer.decode(prompt.token_ids)

    def add(self, choice: Choice, output: StepOutput) -> StepOutput:
        """Count a choice's output and return it as the client gets it."""
        if self.shown.prompt_only and output.token_id is not None:
            output = without_token(output)
        choice.add(output)
        return output

    def usage(self) -> Usage:
        """Sum up all choices. A prompt counts once, as its first choice found it, however many continue it."""
        first = {id(choice.prompt): choice for choice in reversed(self.choices)}.values()
        return _usage(
            sum(choice.prompt_tokens for choice in first),
            sum(choice.completion_tokens for choice in self.choices),
            sum(choice.cached_tokens for choice in first),
        )


def _usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def without_token(output: StepOutput) -> StepOutput:
    """Return the only output of an answer without tokens, which lacks the one token that the engine sampled."""
    return dataclasses.replace(
        output, token_id=None, text_delta="", finish_reason="length", completion_tokens=0, logprobs=None
    )


def is_first(output: StepOutput) -> bool:
    """True if an output has a choice's first token, or ends an answer without tokens (see `without_token`)."""
    ends_without_tokens = output.completion_tokens == 0 and output.finish_reason == "length"
    return ends_without_tokens or (output.completion_tokens == 1 and output.token_id is not None)


class WireFormat(ABC):
    """Writes one answer, as the events of a stream or as one JSON object.

    Args:
        answer: the answer.
        include_usage: whether the stream ends with the usage of all choices.
        continuous_usage: whether every chunk has its choice's usage so far.

    Attributes:
        last: the bytes that every stream of this format ends with, however its choices ended.
    """

    last: ClassVar[bytes]

    def __init__(self, answer: Answer, *, include_usage: bool, continuous_usage: bool) -> None:
        self.answer = answer
        self.include_usage = include_usage
        self.continuous_usage = continuous_usage

    @abstractmethod
    def events(self, choice: Choice, output: StepOutput) -> bytes:
        """Return the events of one output of a choice, which has counted it already."""

    @abstractmethod
    def closing(self) -> bytes:
        """Return the events that follow every choice's last output."""

    @abstractmethod
    def whole(self, said: Sequence[Sequence[StepOutput]]) -> Mapping[str, object]:
        """Return the JSON answer, from all outputs of every choice."""


# ---------------------------------------------------------------------- from the engine's outputs to bytes


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
