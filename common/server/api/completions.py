"""`POST /v1/completions`: continues prompts. The classes of OpenAI's streams, which chat writes, too.

The named events of `/v1/completions` have OpenAI chunks as `data`, except `error`. There is no `[DONE]`: every
`data` is a JSON object, and the stream ends with the HTTP response.

```text
event: token         one for each token of the answer
data: {…}

event: done          or error: one for each choice, its last
data: {…}

event: usage         only with stream_options.include_usage: all choices together
data: {…}
```

OpenAI's own streams, which strict tools want, are unnamed chunks. A choice that fails ends with
`data: {"error": {…}}`, which names the choice in `choices` if there are several.

```text
data: {… "delta": {"role": "assistant", "content": ""} …}      chat only: first of each choice
data: {…}            one for each sampled token. In a chat with tools or thoughts, a token may have no chunk (its
                     text comes with a later one) or several. A finish_reason is in a choice's last chunk
data: {…}            only with stream_options.include_usage: no choices, and the usage of all choices together
data: [DONE]
```
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Generic, Literal, NotRequired, TypeVar

from fastapi import APIRouter
from pydantic import BeforeValidator, Discriminator, Field, Tag
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from common.request import FinishReason, StepOutput
from common.server.api.answer import (
    Answer,
    AnswerTokens,
    Choice,
    Logprobs,
    Origin,
    Prompt,
    Usage,
    WireFormat,
    is_first,
)
from common.server.api.logprobs import PromptLogprobs, completion_logprobs, prompt_logprobs
from common.server.api.stream import event
from common.server.api.wanted import GenerationRequest, Shown, Text, TokenId, Whole
from common.server.errors import ApiError, ErrorResponse, from_exception, refused
from common.server.routes import OF_TEXT, JsonRoute, answers, event_stream, generate
from common.server.service import Served
from common.text.dialect import Dialect

router = APIRouter(route_class=JsonRoute)

# ---------------------------------------------------------------------- the body

#: The tag of a prompt that is a list, by the type of its first item.
_LIST_FORMS: dict[type, str] = {
    int: "as tokens",
    float: "as tokens",
    bool: "as tokens",
    str: "as texts",
    list: "as token lists",
}


def _prompt_form(prompt: Any) -> str | None:
    """Return the tag for the type of a prompt's value; None: no type fits.

    Without tags, pydantic would try all types, and report a bad token id once for each type.
    """
    if type(prompt) is str:
        return "as text"
    if type(prompt) is not list:
        return None
    return _LIST_FORMS.get(type(prompt[0])) if prompt else "as tokens"


Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[Text], Field(min_length=1, fail_fast=True)]
TokenLists = Annotated[list[Tokens], Field(min_length=1, fail_fast=True)]
GivenPrompt = Annotated[
    Annotated[Text, Tag("as text")]
    | Annotated[Tokens, Tag("as tokens")]
    | Annotated[Texts, Tag("as texts")]
    | Annotated[TokenLists, Tag("as token lists")],
    Discriminator(
        _prompt_form,
        custom_error_type="prompt_type",
        custom_error_message="Input should be a string, a list of strings, a list of token ids, or a list of "
        "lists of token ids",
    ),
]


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`. null means the default, for all but `prompt`."""

    places: ClassVar[tuple[str, ...]] = ("all bodies", "completions")
    adds_special_tokens_by_default: ClassVar[bool] = True

    prompt: GivenPrompt
    """one prompt or several; special tokens are added to text, not to token ids"""
    max_tokens: Annotated[Whole, Field(ge=-1)] | None = None
    """default: 128, or fewer if fewer fit; -1: as many as fit; 0 computes only the prompt, for `echo` or
    `prompt_logprobs`"""
    logprobs: Annotated[
        Annotated[Whole, Field(ge=0, le=20)] | None,
        BeforeValidator(
            lambda value: None if value is False else value,
            json_schema_input_type=Annotated[int, Field(ge=0, le=20)] | Literal[False] | None,
        ),
    ] = None
    """log-probabilities of each sampled token, and of so many of the likeliest tokens"""
    best_of: Whole | None = Field(default=None, ge=1)
    """must equal n, since every choice is sent"""

    @property
    def num_prompts(self) -> int:
        return len(self.prompts(Dialect()))

    def prompts(self, dialect: Dialect) -> list[str] | list[list[int]]:  # noqa: ARG002 - chat's
        """Return all prompts as a list, even if the body has a single prompt that is not in a list."""
        prompt: Any = self.prompt
        return prompt if _prompt_form(prompt) in ("as texts", "as token lists") else [prompt]

    @property
    def max_new_tokens(self) -> int | None:
        """The largest number of tokens to sample; None: `default_new_tokens`. If `max_tokens` is 0, one token is
        sampled, and the answer leaves it out."""
        return None if self.max_tokens in (None, -1) else max(1, self.max_tokens)

    @property
    def default_new_tokens(self) -> int | None:
        return None if self.max_tokens == -1 else 128

    @property
    def reported_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def scored_prompt(self) -> int | None:
        wanted = [super().scored_prompt, self.logprobs if self.echo else None]
        return max((each for each in wanted if each is not None), default=None)

    @property
    def shown(self) -> Shown:
        return dataclasses.replace(super().shown, logprobs=self.logprobs, prompt_only=self.max_tokens == 0)

    def echo_of(self, number: int) -> str | None:
        text = self.prompts(Dialect())[number]
        return text if isinstance(text, str) and self.truncate_prompt_tokens is None else None

    def _check_fields(self) -> None:
        super()._check_fields()
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise refused("max_tokens", "0 only with echo or prompt_logprobs; send at least 1")
        if self.max_tokens == 0 and self.min_tokens:
            raise refused("min_tokens", f"{self.min_tokens} is more than max_tokens, 0")
        if self.best_of is not None and self.best_of != self.choices_per_prompt:
            raise refused("best_of", "not implemented; send the value of n, or leave it out")


# ---------------------------------------------------------------------- the answer's objects

OpenAIReason = Literal["stop", "length"]


class ErrorEvent(ErrorResponse):
    """The `data` of the event that ends a failed choice of completions or chat. `choices` names the failed choice
    if the answer has several."""

    choices: NotRequired[list[Mapping[str, object]]]


class Header(Origin):
    """Fields of the JSON answer, and of each chunk of a stream, of completions and chat."""

    id: str


class PromptTokens(TypedDict):
    """Fields about the prompt that are present only if asked for."""

    prompt_token_ids: NotRequired[
        Annotated[list[int], Field(description="with `return_token_ids`; in a stream, once")]
    ]
    prompt_logprobs: NotRequired[
        Annotated[
            PromptLogprobs | None,
            Field(
                description="by token id, for each token of the prompt; null for the first; in a stream, once"
            ),
        ]
    ]


class ShownTokens(AnswerTokens, PromptTokens):
    """Fields about the answer's tokens and the prompt's, in a completion's choice.

    Chat has the fields about the prompt beside its choices, not in them.
    """


class CompletionChoice(ShownTokens):
    index: Annotated[int, Field(description="prompt × n + j")]
    text: str
    logprobs: Logprobs | None
    finish_reason: OpenAIReason


class ChunkChoice(ShownTokens):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: OpenAIReason | None


class TextHeader(Header):
    object: Literal["text_completion"]


class PlainCompletion(TextHeader):
    """The JSON answer of completions in OpenAI's form."""

    choices: list[CompletionChoice]
    usage: Usage


class Completion(PlainCompletion):
    """The JSON answer of `/v1/completions`: OpenAI's, with the engine's own finish reason."""

    finish_reason: Annotated[FinishReason, Field(description="the engine's reason of choice 0")]


class TextChunk(TextHeader):
    """Fields of every chunk of a completion's stream."""

    choices: Annotated[
        list[ChunkChoice], Field(max_length=1, description="empty in the one with the usage of all")
    ]


class CompletionChunk(TextChunk):
    """A chunk of a completion's stream in OpenAI's form."""

    usage: NotRequired[Annotated[Usage | None, Field(description="only if asked for")]]


class CompletionEvent(TextChunk):
    """The `data` of a `token`, `done` or `usage` event: an OpenAI chunk with further fields."""

    token: NotRequired[Annotated[str, Field(description="`token`: the text that this token completed")]]
    token_id: NotRequired[Annotated[int | None, Field(description="`token`")]]
    finish_reason: NotRequired[Annotated[FinishReason, Field(description="`done`: the engine's reason")]]
    usage: NotRequired[Annotated[Usage, Field(description="`done`, `usage`, and `token` if asked for")]]


# ---------------------------------------------------------------------- OpenAI's streams

ChoiceT = TypeVar("ChoiceT")

DONE = b"data: [DONE]\n\n"

#: OpenAI's `finish_reason` for each finish reason of the engine.
OPENAI_FINISH_REASONS: dict[FinishReason, OpenAIReason] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "cancelled": "stop",
}


class PlainChunks(WireFormat, Generic[ChoiceT]):
    """Base class of OpenAI's own streams, for completions and for chat: unnamed chunks, then `[DONE]`."""

    @abstractmethod
    def choices(self, choice: Choice, output: StepOutput) -> Iterator[ChoiceT]:
        """Yield one choice object for each chunk that an output needs."""

    @abstractmethod
    def chunk(self, choices: list[ChoiceT]) -> Any:
        """Return a chunk, an object, with these choice objects."""

    def events(self, choice: Choice, output: StepOutput) -> bytes:
        if output.error is not None:
            return event(error_event(self.answer, choice, output))
        chunks = [self.chunk([part]) for part in self.choices(choice, output)]
        if self.include_usage:  # then every chunk has the key, with null unless usage is continuous
            for chunk in chunks:
                chunk["usage"] = choice.usage() if self.continuous_usage else None
        return b"".join(map(event, chunks))

    def lost(self, error: ApiError) -> bytes:
        return event(error.body()) + DONE

    def closing(self) -> bytes:
        if not self.include_usage:
            return DONE
        chunk = self.chunk([])
        chunk["usage"] = self.answer.usage()
        return event(chunk) + DONE


# ---------------------------------------------------------------------- fields of all formats


def error_event(answer: Answer, choice: Choice, output: StepOutput) -> ErrorEvent:
    """Return the `data` of the event that ends a choice which failed, and names it if there are several."""
    assert output.error is not None, "an output that finishes has a reason or an error"
    data: ErrorEvent = {"error": from_exception(output.error).body()["error"]}
    if len(answer.choices) > 1:
        data["choices"] = [{"index": choice.index}]
    return data


def answer_tokens(answer: Answer, said: Sequence[StepOutput]) -> AnswerTokens:
    """Return the field `token_ids` of a choice with these outputs; no field if the request did not ask for it."""
    return {"token_ids": token_ids(said)} if answer.shown.token_ids else {}


def token_ids(said: Sequence[StepOutput]) -> list[int]:
    return [output.token_id for output in said if output.token_id is not None]


def show_prompt(fields: PromptTokens, answer: Answer, prompt: Prompt) -> None:
    """Add the token ids and log-probabilities of a prompt to an object, as far as the request asked for them."""
    if answer.shown.token_ids:
        fields["prompt_token_ids"] = list(prompt.token_ids)
    if answer.shown.prompt_logprobs is not None:
        fields["prompt_logprobs"] = prompt_logprobs(answer.tokenizer, prompt, answer.shown.prompt_logprobs)


def engine_reason(said: Sequence[StepOutput]) -> FinishReason:
    """Return the engine's finish reason of a choice that did not fail."""
    reason = said[-1].finish_reason
    assert reason is not None, "a choice that did not fail has a reason"
    return reason


# ---------------------------------------------------------------------- the answer


class NamedCompletionEvents(WireFormat):
    """The wire format of `/v1/completions`, this server's own: events named `token`, `done`, `usage` or `error`.

    The `data` of an event, except an error's, is an OpenAI chunk. `CompletionChunks` writes unnamed chunks.
    """

    def events(self, choice: Choice, output: StepOutput) -> bytes:
        token = self._token(choice, output) if output.token_id is not None else b""
        return token + self._terminal(choice, output) if output.finished else token

    def lost(self, error: ApiError) -> bytes:
        return event(error.body(), "error")

    def closing(self) -> bytes:
        if not self.include_usage:
            return b""
        data = self._chunk([])
        data["usage"] = self.answer.usage()
        return event(data, "usage")

    def whole(self, said: Sequence[Sequence[StepOutput]]) -> Completion:
        return {**completion(self.answer, said), "finish_reason": engine_reason(said[0])}

    def _chunk(self, choices: list[ChunkChoice]) -> CompletionEvent:
        answer = self.answer
        return {"id": answer.id, "object": "text_completion", **answer.origin, "choices": choices}

    def _token(self, choice: Choice, output: StepOutput) -> bytes:
        data = self._chunk([chunk_choice(self.answer, choice, output)])
        data["token"] = output.text_delta
        data["token_id"] = output.token_id
        if self.continuous_usage:
            data["usage"] = choice.usage()
        return event(data, "token")

    def _terminal(self, choice: Choice, output: StepOutput) -> bytes:
        if output.finish_reason is None:
            return event(error_event(self.answer, choice, output), "error")
        last: ChunkChoice = {"index": choice.index, "text": "", "logprobs": None, "finish_reason": None}
        if (
            self.answer.shown.prompt_only
        ):  # without tokens there is no token event, so this one has the prompt
            last = chunk_choice(self.answer, choice, output)
        last["finish_reason"] = OPENAI_FINISH_REASONS[output.finish_reason]
        data = self._chunk([{**last, **self.answer.stop_reason(choice)}])
        data["finish_reason"] = output.finish_reason
        data["usage"] = choice.usage()
        return event(data, "done")


class CompletionChunks(PlainChunks[ChunkChoice]):
    """The wire format of `/openai/v1/completions`: a stream of OpenAI's unnamed chunks, or one JSON answer."""

    def choices(self, choice: Choice, output: StepOutput) -> Iterator[ChunkChoice]:
        chunk = chunk_choice(self.answer, choice, output)
        chunk["finish_reason"] = output.finish_reason and OPENAI_FINISH_REASONS[output.finish_reason]
        yield {**chunk, **self.answer.stop_reason(choice)} if output.finished else chunk

    def chunk(self, choices: list[ChunkChoice]) -> CompletionChunk:
        answer = self.answer
        return {"id": answer.id, "object": "text_completion", **answer.origin, "choices": choices}

    def whole(self, said: Sequence[Sequence[StepOutput]]) -> PlainCompletion:
        return completion(self.answer, said)


# ---------------------------------------------------------------------- objects


def completion(answer: Answer, said: Sequence[Sequence[StepOutput]]) -> PlainCompletion:
    """Return OpenAI's JSON answer. `said` has all outputs of each choice."""
    return {
        "id": answer.id,
        "object": "text_completion",
        **answer.origin,
        "choices": [
            {
                "index": choice.index,
                "text": choice.prompt.echo + "".join(output.text_delta for output in outputs),
                "logprobs": completion_logprobs(answer, choice, outputs),
                "finish_reason": OPENAI_FINISH_REASONS[engine_reason(outputs)],
                **answer.stop_reason(choice),
                **shown_tokens(answer, choice, outputs),
            }
            for choice, outputs in zip(answer.choices, said, strict=True)
        ],
        "usage": answer.usage(),
    }


def chunk_choice(answer: Answer, choice: Choice, output: StepOutput) -> ChunkChoice:
    """Return the choice object of a stream's chunk for one output, with `finish_reason` None."""
    if answer.text_only:
        return {"index": choice.index, "text": output.text_delta, "logprobs": None, "finish_reason": None}
    echo = choice.prompt.echo if is_first(output) else ""
    return {
        "index": choice.index,
        "text": echo + output.text_delta,
        "logprobs": completion_logprobs(answer, choice, [output]),
        "finish_reason": None,
        **shown_tokens(answer, choice, [output]),
    }


def shown_tokens(answer: Answer, choice: Choice, said: Sequence[StepOutput]) -> ShownTokens:
    """Return vLLM's fields about the tokens of these outputs, as far as the request asked for them. The fields
    about the prompt come with a choice's first output."""
    fields: ShownTokens = {}
    if answer.shown.token_ids:
        fields["token_ids"] = token_ids(said)
    if said and is_first(said[0]):
        show_prompt(fields, answer, choice.prompt)
    return fields


# ---------------------------------------------------------------------- the routes


@router.post(
    "/v1/completions",
    **answers(Completion, OF_TEXT, events=event_stream(CompletionEvent, ("token", "done", "error", "usage"))),
)
async def create_completion(request: Request, service: Served, wanted: CompletionRequest) -> Response:
    """Complete one prompt or several, as JSON or as an event stream."""
    if wanted.stream is None:
        wanted.stream = not _asks_for_json(request.headers)
    return await generate(request, service, wanted, NamedCompletionEvents, "cmpl-")


def _asks_for_json(headers: Headers) -> bool:
    """Return whether `Accept` names JSON and no event stream, as OpenAI's clients send it unless they stream."""
    accepted = {part.partition(";")[0].strip().lower() for part in headers.get("accept", "").split(",")}
    return "application/json" in accepted and "text/event-stream" not in accepted


@router.post(
    "/openai/v1/completions",
    **answers(PlainCompletion, OF_TEXT, events=event_stream(CompletionChunk), strict=True),
)
async def create_strict_completion(request: Request, service: Served, wanted: CompletionRequest) -> Response:
    """Complete prompts exactly as OpenAI does: JSON or, if asked to, unnamed chunks; with OpenAI's statuses."""
    return await generate(request, service, wanted, CompletionChunks, "cmpl-")
