"""The bodies of answers, for the OpenAPI document. Who writes them: `common.server.wire` and the routes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from common.telemetry import PAGE_STEPS


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(BaseModel):
    """Every error of every route."""

    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    cached_tokens: int = Field(description="found in memory and not computed; 0 in phases that share nothing")


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Logprobs(BaseModel):
    """One entry for each sampled token, and before them for each token of an echoed prompt. Nothing comes before a
    prompt's first: null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(description="characters of the choice's text that came before the token's")


class PromptLogprob(BaseModel):
    logprob: float
    rank: int = Field(ge=1, description="among all tokens, 1 for the likeliest")
    decoded_token: str


class ShownTokens(BaseModel):
    """What is there only if asked for."""

    token_ids: list[int] | None = Field(default=None, description="with `return_token_ids`")
    prompt_token_ids: list[int] | None = Field(default=None, description="the same; in a stream, once")
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = Field(
        default=None,
        description="by token id, for each token of the prompt; null for the first; in a stream, once",
    )


class CompletionChoice(ShownTokens):
    index: int = Field(description="prompt × n + j")
    text: str
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"]


class Part(BaseModel):
    """What every object of an answer begins with."""

    id: str
    created: int = Field(description="seconds since 1970")
    model: str


class PlainCompletion(Part):
    """The JSON answer."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class Completion(PlainCompletion):
    """The JSON answer. A stream's events hold the same objects in pieces."""

    finish_reason: Literal["eos", "stop", "length", "cancelled"] = Field(
        description="the engine's reason of choice 0"
    )


class ChunkChoice(ShownTokens):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionChunk(Part):
    """The `data` of a plain stream's event."""

    object: Literal["text_completion"]
    choices: list[ChunkChoice] = Field(max_length=1, description="empty in the one with the usage of all")
    usage: Usage | None = Field(default=None, description="only if asked for")


class CompletionEvent(CompletionChunk):
    """The `data` of a `token`, `done` or `usage` event: an OpenAI chunk, and more."""

    token: str | None = Field(default=None, description="`token`: the text that this token let out")
    token_id: int | None = Field(default=None, description="`token`")
    finish_reason: Literal["eos", "stop", "length", "cancelled"] | None = Field(
        default=None, description="`done`: the engine's reason"
    )
    usage: Usage | None = Field(default=None, description="`done`, `usage`, and `token` if asked for")


class ChatTokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None = Field(description="UTF-8; null where a token is part of a character")


class ChatTokenLogprobs(ChatTokenLogprob):
    top_logprobs: list[ChatTokenLogprob] = Field(description="most likely first")


class ChatLogprobs(BaseModel):
    """One entry for each sampled token."""

    content: list[ChatTokenLogprobs]
    refusal: None


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(Part):
    """The JSON answer."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class Delta(BaseModel):
    role: Literal["assistant"] | None = Field(default=None, description="in a choice's first chunk")
    content: str


class ChatChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class ChatCompletionChunk(Part):
    """The `data` of a stream's event."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice] = Field(max_length=1, description="empty in the one with the usage of all")
    usage: Usage | None = Field(default=None, description="only if asked for")


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int = Field(description="prompt and new tokens of one request at the most")
    phase: str


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = Field(description="as the tokenizer spells them, if asked for")


class Text(BaseModel):
    prompt: str


class Health(BaseModel):
    status: Literal["ok", "paused", "draining"]
    phase: str


class Ready(BaseModel):
    status: Literal["ok"]
    phase: str


class Version(BaseModel):
    version: str
    phase: str
    torch: str
    device: str
    dtype: str
    kernels: Literal["triton", "native", "torch"] = Field(
        description="what computes norms, attention and the like"
    )
    batch_invariant: bool = Field(
        description="whether a sequence's logits have the same bits alone and beside any others: measured at start "
        "with native kernels, false without"
    )


class NoFields(BaseModel):
    """A body without fields; it may be left out."""

    model_config = ConfigDict(extra="forbid")


class CacheReset(BaseModel):
    dropped_blocks: int = Field(description="blocks of the prefix cache that nobody used")


class TelemetrySnapshot(BaseModel):
    """Counters since the start, and a page of the latest steps."""

    phase: str
    max_batch_size: int
    max_seq_len: int
    queue_room: int = Field(description="requests that would be taken before new ones are answered 503")
    counters: dict[str, float]
    steps: list[dict[str, float]] = Field(max_length=PAGE_STEPS)
    next_step: int = Field(
        description="`since_step` of the next page, which is there already if this is less than the steps counted"
    )
