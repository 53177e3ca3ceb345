"""An answer in progress: its prompts and choices, and the path of the engine's outputs to a wire format."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NotRequired

import orjson
from pydantic import Field
from typing_extensions import TypedDict

from common.hosting.async_engine import RequestStream
from common.request import StepOutput, TokenLogprobs
from common.server.api.lanes import Lane
from common.server.api.parts import ArgumentsPart, CallPart, Part, PartsReader, TextPart, new_reader
from common.server.api.stream import event
from common.server.api.wanted import GenerationRequest, Shown, StreamOptions
from common.server.errors import ApiError, from_exception
from common.text.dialect import Dialect, opens_thought
from common.text.tokenizer import Tokenizer

#: Most entries of a JSON answer that is encoded on the event loop: new tokens, and tokens named in their
#: log-probabilities. Larger answers, and all log-probabilities of prompts, are encoded in a thread.
LARGE_ANSWER = 512

#: Number of a prompt's last tokens that are decoded to find out whether the prompt ends with `<think>`, which
#: opens a thought. Only white space may follow this marker.
THOUGHT_TOKENS = 8


class Origin(TypedDict):
    """Fields that say when and by which server an answer was made."""

    created: Annotated[int, Field(description="seconds since 1970")]
    model: str
    system_fingerprint: Annotated[
        str, Field(description="a name for the version, the phase, the model and its number types together")
    ]


class AnswerOrigin(Origin, closed=True):
    """The fields of `Origin`, and no others, which each chunk of an answer repeats."""


class PromptTokensDetails(TypedDict):
    cached_tokens: Annotated[
        int, Field(description="prompt tokens found in the prefix cache; 0 in phases without one")
    ]


class CompletionTokensDetails(TypedDict):
    accepted_prediction_tokens: Annotated[
        int, Field(description="guesses that came true (phase 10), from `prediction` or from the text so far")
    ]
    rejected_prediction_tokens: Annotated[
        int, Field(description="guesses that were wrong: computed, but not part of the answer")
    ]
    reasoning_tokens: Annotated[
        int, Field(description="tokens of the thoughts, which are kept apart from the answer")
    ]


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class AnswerTokens(TypedDict):
    """Fields of a choice that are present only if they have a value or are asked for."""

    stop_reason: NotRequired[
        Annotated[str | int, Field(description="the stop string, or the id of the stop token, that ended it")]
    ]
    token_ids: NotRequired[Annotated[list[int], Field(description="with `return_token_ids`")]]


class Logprobs(TypedDict):
    """Four lists with an entry for each token: first the tokens of an echoed prompt, then those of the answer.

    A prompt's first token has no log-probability, and no token of a prompt that was not scored has one. The
    entries of these tokens in `token_logprobs` and `top_logprobs` are null.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: Annotated[
        list[int], Field(description="characters of the choice's text that came before the token's")
    ]


# ---------------------------------------------------------------------- an answer and its choices


@dataclass(slots=True)
class Prompt:
    """One prompt of a request, and the values about this prompt that the answer's choices show."""

    token_ids: Sequence[int] = ()  # empty if the answer is `text_only`
    echo: str = ""  # the text that the prompt's choices begin with
    # Scores are log-probabilities of the prompt's tokens from the second on. If they are asked for, they come with
    # the first output of the prompt's first choice, unless that choice ends without them.
    is_scored: bool = False
    scores: Sequence[TokenLogprobs] | None = None
    # Made from the scores, once for all choices: the field `prompt_logprobs` as JSON, and an echo's
    # log-probabilities.
    logprobs_json: bytes | None = None
    echoed_logprobs: Logprobs | None = None


@dataclass(slots=True)
class Choice:
    """One choice of an answer as it grows."""

    index: int  # if each prompt has n choices, choice j of prompt i has the number i × n + j
    prompt: Prompt  # shared with the prompt's other choices
    is_prompts_first: bool  # only the engine's request for its first choice asks for a prompt's scores
    latest: StepOutput | None = None
    reader: PartsReader | None = None  # None: all of the text belongs to the answer

    def parts(self, output: StepOutput) -> list[Part]:
        """Return the text of an output, cut into pieces of answer, thoughts and tool calls (`parts`).

        Call this once for each output, in order: text may be held back until a later output.
        """
        if self.reader is None:
            return [TextPart(output.text_delta)] if output.text_delta else []
        parts = self.reader.add(output.text_delta)
        return parts + self.reader.finish() if output.finished else parts

    def usage(self) -> Usage:
        """Return the choice's token counts up to `latest`, which must not be None."""
        return usage_of([self], [self])


class Answer:
    """One answer: its choices, the engine's outputs for each choice (`streams`), and values that its JSON objects
    share."""

    def __init__(
        self,
        wanted: GenerationRequest,
        answer_id: str,
        streams: Sequence[RequestStream],
        *,
        tokenizer: Tokenizer,
        dialect: Dialect,
        model: str,
        fingerprint: str,
    ) -> None:
        self.id = answer_id
        self.created = int(time.time())
        self.model = model
        self.tokenizer = tokenizer
        self.streams = streams
        self.shown = wanted.shown
        self.text_only = self.shown == Shown()
        # The fields behind `id` and `object` in each chunk, or in the JSON answer, of completions and chat.
        self.origin: AnswerOrigin = {
            "created": self.created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        per_prompt = wanted.choices_per_prompt
        prompts = [
            Prompt() if self.text_only else self._shown_prompt(wanted, number, streams[number * per_prompt])
            for number in range(wanted.num_prompts)
        ]
        self.choices = [
            Choice(index, prompts[index // per_prompt], is_prompts_first=index % per_prompt == 0)
            for index in range(len(streams))
        ]
        names = wanted.tool_use.names if wanted.tool_use is not None else ()
        if names or (wanted.has_parts and dialect.thinks):
            tail = streams[0].request.prompt_token_ids[-THOUGHT_TOKENS:]
            thinking = opens_thought(tokenizer.decode(tail, skip_special_tokens=False))
            for choice in self.choices:
                choice.reader = new_reader(dialect, names=names, thinking=thinking)
        self._held_back: list[tuple[Choice, StepOutput]] = []

    def _shown_prompt(self, wanted: GenerationRequest, number: int, stream: RequestStream) -> Prompt:
        """Return a prompt with its token ids and, if the request asked for an echo, its text."""
        token_ids, echo = stream.request.prompt_token_ids, ""
        if self.shown.echo:
            text = wanted.echo_of(number)
            skipped = stream.request.params.skip_special_tokens
            echo = self.tokenizer.decode(token_ids, skip_special_tokens=skipped) if text is None else text
        return Prompt(token_ids, echo)

    def ready(self, arrived: Iterable[tuple[int, StepOutput]]) -> Iterator[tuple[Choice, StepOutput]]:
        """Yield the outputs that can be sent now that these have arrived, each with its choice.

        All choices of a prompt may show its scores, which come with the first output of its first choice. Until
        then, outputs of the other choices are held back.
        """
        for index, output in arrived:
            choice = self.choices[index]
            prompt = choice.prompt
            if self.shown.prompt_only and output.token_id is not None:
                output = without_token(output)
            if prompt.is_scored or not self.shown.scores_prompts:
                yield choice, output
            elif not choice.is_prompts_first:
                self._held_back.append((choice, output))
            else:
                prompt.is_scored, prompt.scores = True, output.prompt_logprobs
                yield choice, output
                yield from (each for each in self._held_back if each[0].prompt is prompt)
                self._held_back = [each for each in self._held_back if each[0].prompt is not prompt]

    def stop_reason(self, choice: Choice) -> AnswerTokens:
        """Return the field `stop_reason` with the stop string or stop token that ended a choice; no field if
        neither did."""
        last, request = choice.latest, self.streams[choice.index].request
        if last is None or last.finish_reason != "stop":
            return {}
        if last.token_id in request.params.stop_token_ids:
            return {"stop_reason": last.token_id}
        stopped_by = None if request.detokenizer is None else request.detokenizer.stopped_by
        return {} if stopped_by is None else {"stop_reason": stopped_by}

    def usage(self) -> Usage:
        """Return the token counts of all choices together. A prompt counts once, as in its first choice's usage."""
        return usage_of([choice for choice in self.choices if choice.is_prompts_first], self.choices)

    def cancel(self) -> None:
        """Cancel the engine's requests for all choices. Finished requests stay as they are."""
        for stream in self.streams:
            stream.cancel()


def usage_of(prompts: Sequence[Choice], choices: Sequence[Choice]) -> Usage:
    """Return token counts: of new tokens, summed over `choices`, and of prompt tokens, summed over `prompts`, which
    has one choice of each prompt. Each choice must have an output already."""
    first, latest = ([each.latest for each in some if each.latest is not None] for some in (prompts, choices))
    assert (len(first), len(latest)) == (len(prompts), len(choices)), "each choice has an output"
    prompt_tokens = sum(output.prompt_tokens for output in first)
    completion_tokens = sum(output.completion_tokens for output in latest)
    accepted_tokens = sum(output.accepted_tokens for output in latest)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in first)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted_tokens,
            "rejected_prediction_tokens": sum(output.draft_tokens for output in latest) - accepted_tokens,
            "reasoning_tokens": sum(each.reader.thoughts for each in choices if each.reader is not None),
        },
    }


def without_token(output: StepOutput) -> StepOutput:
    """Return an output without its token: the engine samples one even if the request wants only the prompt."""
    return dataclasses.replace(
        output, token_id=None, text_delta="", finish_reason="length", completion_tokens=0, logprobs=None
    )


def is_first(output: StepOutput) -> bool:
    """True if an output has a choice's first token, or had it before `without_token` removed it."""
    ends_without_tokens = output.completion_tokens == 0 and output.finish_reason == "length"
    return ends_without_tokens or (output.completion_tokens == 1 and output.token_id is not None)


class WireFormat(ABC):
    """Writes one answer, as the events of a stream or as one JSON object."""

    ping: ClassVar[bytes | None] = None  # an event without a meaning, for idle connections; None: a comment

    def __init__(self, answer: Answer, wanted: GenerationRequest) -> None:
        options = wanted.stream_options or StreamOptions()
        self.answer = answer
        self.include_usage = bool(options.include_usage)
        self.continuous_usage = bool(options.continuous_usage_stats)

    def opening(self) -> bytes:
        """Return the events that come before those of the first output. Most formats have none."""
        return b""

    @abstractmethod
    def events(self, choice: Choice, output: StepOutput) -> bytes:
        """Return the events of an output: the `latest` of its choice, unless it has an error."""

    @abstractmethod
    def lost(self, error: ApiError) -> bytes:
        """Return the events that end a stream with an error, at whatever event it breaks off.

        Called before the stream's first event, for the process that passes the stream on (`stream`).
        """

    @abstractmethod
    def closing(self) -> bytes:
        """Return the events that end the stream, once all choices have ended."""

    @abstractmethod
    def whole(self, said: Sequence[Sequence[StepOutput]]) -> Mapping[str, object]:
        """Return the JSON answer, an object. `said` has, for each choice in order, the list of its outputs."""


class ItemFormat(WireFormat):
    """Base class of the formats whose answer is a list of items: each is a text, a thought or a call.

    In a stream, an item begins, grows by pieces and ends, with an event for each. A subclass writes the items and
    the events. An event shares its items with the answer, and items grow: encode each event before the next.

    Attributes:
        items: the items so far. The one in progress, if there is one, is the last.
    """

    def __init__(self, answer: Answer, wanted: GenerationRequest) -> None:
        super().__init__(answer, wanted)
        self.items: list[Any] = []
        self._in_progress: type[Part] | None = None  # the kind of part that the item in progress began with
        self._pieces: list[str] = []  # of that item's text

    @abstractmethod
    def begin(self, part: Part) -> Iterator[Mapping[str, Any]]:
        """Add the item that a part begins to `items`. Yields the events of its beginning."""

    @abstractmethod
    def piece(self, text: str) -> Mapping[str, Any]:
        """Return the event of a piece of the item in progress."""

    @abstractmethod
    def end(self, text: str, complete: bool) -> Iterator[Mapping[str, Any]]:
        """Complete the last item, which has this text. Yields the events of its end."""

    @abstractmethod
    def end_answer(self, choice: Choice, output: StepOutput) -> Iterator[Mapping[str, Any]]:
        """Yield the events that end an answer, given its last output."""

    @abstractmethod
    def fail(self, error: Exception) -> Iterator[Mapping[str, Any]]:
        """Yield the events that end an answer which failed."""

    def events(self, choice: Choice, output: StepOutput) -> bytes:
        return b"".join(event(each, each["type"]) for each in self.walk(choice, output))

    def lost(self, error: ApiError) -> bytes:
        return b"".join(event(each, each["type"]) for each in self.fail(error))

    def closing(self) -> bytes:
        return b""

    def walk(self, choice: Choice, output: StepOutput) -> Iterator[Mapping[str, Any]]:
        """Add the parts of an output to the items. Yields their events."""
        if output.error is not None:
            yield from self.fail(output.error)
            return
        for part in choice.parts(output):
            if isinstance(part, CallPart) or not isinstance(part, self._in_progress or ()):
                yield from self.begin_item(part)
            if not isinstance(part, CallPart):
                self._pieces.append(part.text)
                yield self.piece(part.text)
        if output.finished:
            yield from self.end_answer(choice, output)

    def begin_item(self, part: Part) -> Iterator[Mapping[str, Any]]:
        """End the item in progress, and begin the next. Yields the events of both."""
        yield from self.end_item()
        self._in_progress = ArgumentsPart if isinstance(part, CallPart) else type(part)
        yield from self.begin(part)

    def end_item(self, *, complete: bool = True) -> Iterator[Mapping[str, Any]]:
        """End the item in progress, if there is one. Yields the events of its end."""
        if self._in_progress is not None:
            text, self._pieces, self._in_progress = "".join(self._pieces), [], None
            yield from self.end(text, complete)


# ---------------------------------------------------------------------- from the engine's outputs to bytes


async def stream_events(wire: WireFormat, encoding: Lane) -> AsyncIterator[bytes]:
    """Yield the events of an answer's stream, from its opening to its closing, as outputs arrive.

    Events with log-probabilities of a prompt, a choice's first, are made in a thread.
    """
    answer = wire.answer
    if opening := wire.opening():
        yield opening
    async for arrived in arriving(answer.streams):
        events = []
        for choice, output in answer.ready(arrived):
            choice.latest = output
            if answer.shown.scores_prompts and output.completion_tokens <= 1:
                events.append(await encoding.run(functools.partial(wire.events, choice, output)))
            else:
                events.append(wire.events(choice, output))
        if chunk := b"".join(events):
            yield chunk
    if closing := wire.closing():
        yield closing


async def collect(wire: WireFormat, encoding: Lane) -> bytes:
    """Return the encoded JSON answer once every choice has ended. Large answers are encoded in a thread.

    Raises:
        ApiError: a choice failed, so the whole answer fails.
    """
    answer = wire.answer
    said: list[list[StepOutput]] = [[] for _ in answer.choices]
    async for arrived in arriving(answer.streams):
        for choice, output in answer.ready(arrived):
            if output.error is not None:
                raise from_exception(output.error)
            choice.latest = output
            said[choice.index].append(output)

    def encode() -> bytes:
        return orjson.dumps(wire.whole(said))

    entries = sum(len(outputs) * _entries_of(outputs[0]) for outputs in said)
    is_large = answer.shown.scores_prompts or entries > LARGE_ANSWER
    return await encoding.run(encode) if is_large else encode()


def _entries_of(output: StepOutput) -> int:
    return 1 if output.logprobs is None else 1 + len(output.logprobs.top)


async def arriving(streams: Sequence[RequestStream]) -> AsyncIterator[list[tuple[int, StepOutput]]]:
    """Yield lists of outputs as they arrive, usually those of one step, each with the index of its stream."""
    news = asyncio.Event()
    for stream in streams:
        stream.news = news
    running = dict(enumerate(streams))
    while running:
        arrived = [(index, output) for index, stream in running.items() for output in stream.take()]
        if not arrived:
            news.clear()
            await news.wait()
            continue
        for index, output in arrived:
            if output.finished:
                del running[index]
        yield arrived
