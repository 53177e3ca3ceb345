"""`POST /v1/chat/completions`: answers a conversation, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, NotRequired

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from common.request import FinishReason, StepOutput
from common.server.api.answer import Answer, AnswerTokens, Choice, Usage
from common.server.api.bodies import Fields
from common.server.api.completions import (
    OPENAI_FINISH_REASONS,
    Header,
    PlainChunks,
    PromptTokens,
    answer_tokens,
    engine_reason,
    show_prompt,
)
from common.server.api.conversation import (
    EFFORT,
    VERBOSITY,
    ChatMessage,
    Content,
    ConversationRequest,
    Messages,
    ReasoningEffort,
    text_of,
)
from common.server.api.logprobs import ChatLogprobs, chat_logprobs
from common.server.api.parts import ArgumentsPart, CallPart, Part, ReasoningPart, TextPart
from common.server.api.tools import CHOICE, ToolChoice
from common.server.api.wanted import NewTokens, Whole
from common.server.errors import refused
from common.server.routes import OF_BODIES, OF_TEXT, JsonRoute, answers, convert, event_stream, generate
from common.server.service import Served
from common.text.chat_template import BREAK

router = APIRouter(route_class=JsonRoute)

# ---------------------------------------------------------------------- the body


class Prediction(Fields):
    """A text that the client expects the answer to resemble, such as the file that it asks to change."""

    type: Literal["content"]
    content: Content


class ChatRequest(ConversationRequest):
    """The body of `POST /v1/chat/completions`. null means the default, for all but `messages`."""

    messages: Messages
    """each with a `role` and a `content`: a text, or parts of type text"""
    max_completion_tokens: NewTokens = None
    """at most as many as fit after the conversation, which is the default"""
    max_tokens: NewTokens = None
    """the older name of `max_completion_tokens`"""
    logprobs: bool | None = False
    """the log-probability of each sampled token is returned"""
    top_logprobs: Whole | None = Field(default=None, ge=0, le=20)
    """with `logprobs`: the log-probabilities of so many of the likeliest tokens, too"""
    reasoning_effort: ReasoningEffort | None = Field(default=None, description=EFFORT)
    verbosity: str | None = Field(default=None, description=VERBOSITY)
    prediction: Prediction | None = None
    """text that the answer will probably contain; where it does, phase 10 answers faster; it changes no answer"""

    tool_choice: ToolChoice | None = Field(default=None, description=CHOICE)

    store: bool | None = False
    """chats are not stored"""

    @property
    def turns(self) -> Sequence[ChatMessage]:
        return self.messages

    @property
    def hints(self) -> dict[str, str | None]:
        return {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}

    @property
    def predicted_text(self) -> str:
        return "" if self.prediction is None else text_of(self.prediction.content)

    def echo_of(self, number: int) -> str:  # noqa: ARG002 - there is one
        last = self.messages[-1]
        return text_of(last.content) if last.role == "assistant" else ""

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def reported_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def field_of(self, param: str) -> str:
        length = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {"prompt": "messages", "max_tokens": length}.get(param, param)

    def _check_fields(self) -> None:
        super()._check_fields()
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise refused("max_tokens", "another name of max_completion_tokens, with another value; send one")
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs", 'only with "logprobs": true')
        self.check_messages(self.messages)


# ---------------------------------------------------------------------- the answer's objects

ChatReason = Literal["stop", "length", "tool_calls"]


class CalledFunction(TypedDict):
    name: str
    arguments: Annotated[str, Field(description="JSON; incomplete if the answer was cut off within the call")]


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: Annotated[str | None, Field(description="null beside tool calls, if there is no text")]
    refusal: None
    reasoning_content: NotRequired[
        Annotated[str | None, Field(description="the model's thoughts, if its template has markers for them")]
    ]
    tool_calls: NotRequired[Annotated[list[ToolCall], Field(description="if there are any")]]


class ChatChoice(AnswerTokens):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Annotated[ChatReason, Field(description="`tool_calls` after complete calls")]


class ChatCompletion(Header, PromptTokens):
    """The JSON answer of chat."""

    object: Literal["chat.completion"]
    store: NotRequired[Annotated[Literal[False], Field(description="for a request with `store` true")]]
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: Annotated[str, Field(description="a piece; empty beside the name")]


class ToolCallDelta(TypedDict):
    """The beginning of a tool call, with `id`, `type` and name, or a piece of the call's arguments."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class Delta(TypedDict):
    role: NotRequired[Annotated[Literal["assistant"], Field(description="in a choice's first chunk")]]
    content: NotRequired[Annotated[str | None, Field(description="null: no text yet, and perhaps none")]]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[Annotated[list[ToolCallDelta], Field(min_length=1, max_length=1)]]


class ChatChunkChoice(AnswerTokens):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatReason | None


class RenderedChat(TypedDict):
    """The answer of `/apply-template`."""

    prompt: str


class ChatCompletionChunk(Header, PromptTokens):
    """The `data` of an event in a stream of chat, except errors and `[DONE]`."""

    object: Literal["chat.completion.chunk"]
    choices: Annotated[
        list[ChatChunkChoice], Field(max_length=1, description="empty in the one with the usage of all")
    ]
    usage: NotRequired[Annotated[Usage | None, Field(description="only if asked for")]]


# ---------------------------------------------------------------------- the answer


class ChatChunks(PlainChunks[ChatChunkChoice]):
    """The wire format of `/v1/chat/completions`: a stream of OpenAI's chat chunks, or one JSON answer."""

    def __init__(self, answer: Answer, wanted: ChatRequest) -> None:
        super().__init__(answer, wanted)
        self._asked_to_store = bool(wanted.store)
        self._begun: set[int] = set()  # indices of choices whose role has been sent
        self._sent_prompt = False  # whether the fields about the prompt have been sent

    def choices(self, choice: Choice, output: StepOutput) -> Iterator[ChatChunkChoice]:
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            may_call = choice.reader is not None and choice.reader.may_call
            nothing = None if may_call else ""
            yield _chat_chunk(choice, {"role": "assistant", "content": choice.prompt.echo or nothing})
        shown = answer_tokens(self.answer, [output])
        logprobs = chat_logprobs(self.answer, choice, [output])
        deltas = _deltas(choice, output)
        # Text that is held back needs no chunk. A token that is shown needs one, and so does a choice's end.
        if not deltas and (shown or logprobs or output.finished):
            deltas.append({})
        for number, delta in enumerate(deltas, 1):
            chunk = _chat_chunk(choice, delta, logprobs=logprobs)
            if number == len(deltas) and output.finish_reason is not None:
                chunk["finish_reason"] = _chat_reason(choice, output.finish_reason)
                chunk = {**chunk, **self.answer.stop_reason(choice)}
            yield {**chunk, **shown}
            logprobs, shown = None, {}

    def chunk(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        answer = self.answer
        chunk: ChatCompletionChunk = {
            "id": answer.id,
            "object": "chat.completion.chunk",
            **answer.origin,
            "choices": choices,
        }
        if not self._sent_prompt:
            self._sent_prompt = True
            show_prompt(chunk, answer, answer.choices[0].prompt)
        return chunk

    def whole(self, said: Sequence[Sequence[StepOutput]]) -> ChatCompletion:
        answer = self.answer
        completion: ChatCompletion = {
            "id": answer.id,
            "object": "chat.completion",
            **answer.origin,
            "choices": [
                {
                    "index": choice.index,
                    "message": _message(choice, outputs),
                    "logprobs": chat_logprobs(answer, choice, outputs),
                    "finish_reason": _chat_reason(choice, engine_reason(outputs)),
                    **answer.stop_reason(choice),
                    **answer_tokens(answer, outputs),
                }
                for choice, outputs in zip(answer.choices, said, strict=True)
            ],
            "usage": answer.usage(),
        }
        if self._asked_to_store:
            completion["store"] = False
        show_prompt(completion, answer, answer.choices[0].prompt)
        return completion


def _chat_chunk(choice: Choice, delta: Delta, *, logprobs: ChatLogprobs | None = None) -> ChatChunkChoice:
    return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _deltas(choice: Choice, output: StepOutput) -> list[Delta]:
    """Return the text of an output as OpenAI's `delta` objects, one for each piece of answer, thought or call."""
    if choice.reader is None:
        return [{"content": output.text_delta}]
    return [_delta(part) for part in choice.parts(output)]


def _delta(part: Part) -> Delta:
    match part:
        case TextPart(text):
            return {"content": text}
        case ReasoningPart(text):
            return {"reasoning_content": text}
        case CallPart(index, call_id, name):
            function: FunctionDelta = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case ArgumentsPart(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _message(choice: Choice, said: Sequence[StepOutput]) -> AssistantMessage:
    """Return the message of a choice, from all of its outputs."""
    text, reasoning, calls = [choice.prompt.echo], list[str](), list[tuple[str, str, list[str]]]()
    for part in (part for output in said for part in choice.parts(output)):
        match part:
            case TextPart(piece):
                text.append(piece)
            case ReasoningPart(piece):
                reasoning.append(piece)
            case CallPart(_, call_id, name):
                calls.append((call_id, name, []))
            case ArgumentsPart(index, piece):
                calls[index][2].append(piece)
    message: AssistantMessage = {"role": "assistant", "content": "".join(text), "refusal": None}
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": "".join(pieces)}}
            for call_id, name, pieces in calls
        ]
    if choice.reader is not None and choice.reader.thinks:
        message["reasoning_content"] = "".join(reasoning) or None
    return message


def _chat_reason(choice: Choice, reason: FinishReason) -> ChatReason:
    """Return OpenAI's finish reason of a choice. Call this after the choice's reader has read all text."""
    reader = choice.reader
    word = OPENAI_FINISH_REASONS[reason]
    return "tool_calls" if word == "stop" and reader is not None and reader.has_called else word


# ---------------------------------------------------------------------- the routes

_EVENTS = event_stream(ChatCompletionChunk)


@router.post("/v1/chat/completions", **answers(ChatCompletion, OF_TEXT, events=_EVENTS))
@router.post("/openai/v1/chat/completions", **answers(ChatCompletion, OF_TEXT, events=_EVENTS, strict=True))
async def create_chat_completion(request: Request, service: Served, wanted: ChatRequest) -> Response:
    """Answer a conversation, as JSON or, if asked to, as an event stream of OpenAI's chunks."""
    return await generate(request, service, wanted, ChatChunks, "chatcmpl-")


@router.post("/apply-template", **answers(RenderedChat, OF_BODIES))
async def apply_template(request: Request, service: Served, wanted: ChatRequest) -> Response:
    """Return the text that the body of a chat becomes, as llama.cpp's route of this name does."""

    def render() -> RenderedChat:
        (text,) = wanted.prompts(service.dialect)
        return {"prompt": text.replace(BREAK, "")}

    return await convert(request, service, render)
