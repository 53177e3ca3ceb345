"""Shapes of answers: the objects that formats and routes fill in, and that the OpenAPI document describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, NotRequired

import orjson
from pydantic import Field
from typing_extensions import TypedDict

from common.request import FinishReason
from common.server.errors import ErrorResponse

OpenAIReason = Literal["stop", "length"]
ChatReason = Literal["stop", "length", "tool_calls"]


def event(data: Mapping[str, object], name: str | None = None) -> bytes:
    """Encode one server-sent event. JSON has no raw line ends, so `data` is always one line."""
    line = b"data: %b\n\n" % orjson.dumps(data)
    return line if name is None else b"event: %b\n%b" % (name.encode(), line)


class ErrorEvent(ErrorResponse):
    """The `data` of the event that ends a failed choice of completions or chat. `choices` names the failed choice
    if the answer has several."""

    choices: NotRequired[list[Mapping[str, object]]]


# ---------------------------------------------------------------------- text


class Origin(TypedDict):
    """Fields that say when and by which server an answer was made."""

    created: Annotated[int, Field(description="seconds since 1970")]
    model: str
    system_fingerprint: Annotated[
        str, Field(description="a name for the version, the phase, the model and its number types together")
    ]


class Header(Origin):
    """Fields of the JSON answer, and of each chunk of a stream, of completions and chat."""

    id: str


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


class PromptLogprob(TypedDict):
    logprob: float
    rank: Annotated[int, Field(ge=1, description="among all tokens, 1 for the likeliest")]
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class AnswerTokens(TypedDict):
    """Fields of a choice that are present only if they have a value or are asked for."""

    stop_reason: NotRequired[
        Annotated[str | int, Field(description="the stop string, or the id of the stop token, that ended it")]
    ]
    token_ids: NotRequired[Annotated[list[int], Field(description="with `return_token_ids`")]]


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


# ---------------------------------------------------------------------- chat


class ChatTokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: Annotated[
        list[int], Field(description="the token's bytes in UTF-8, perhaps a part of a character")
    ]


class ChatTokenLogprobs(ChatTokenLogprob):
    top_logprobs: Annotated[list[ChatTokenLogprob], Field(description="most likely first")]


class ChatLogprobs(TypedDict):
    """Log-probabilities in a choice of chat. `content` has one entry for each sampled token."""

    content: list[ChatTokenLogprobs]
    refusal: None


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


class ChatCompletionChunk(Header, PromptTokens):
    """The `data` of an event in a stream of chat, except errors and `[DONE]`."""

    object: Literal["chat.completion.chunk"]
    choices: Annotated[
        list[ChatChunkChoice], Field(max_length=1, description="empty in the one with the usage of all")
    ]
    usage: NotRequired[Annotated[Usage | None, Field(description="only if asked for")]]


# ---------------------------------------------------------------------- the other routes


class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: Annotated[list[str] | None, Field(description="as the tokenizer spells them, if asked for")]


class Text(TypedDict):
    prompt: str
