"""Shapes of `/v1/responses`: the response, the items of its output, and the events of its stream."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from common.server.api.shapes import ChatTokenLogprobs, ErrorDetail

Status = Literal["in_progress", "completed", "incomplete"]


# ---------------------------------------------------------------------- items of the output


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[object], Field(max_length=0)]
    logprobs: Annotated[list[ChatTokenLogprobs], Field(description="if `include` asks for them")]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class Item(TypedDict):
    """Fields of every item of a response's output."""

    id: str
    status: Status


class MessageItem(Item):
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: Annotated[list[object], Field(max_length=0, description="the text itself is in `content`")]
    content: list[ReasoningText]
    encrypted_content: None


class FunctionCallItem(Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: NotRequired[Annotated[str, Field(description="of the function, if it is in one")]]
    arguments: Annotated[str, Field(description="the JSON text of an object")]


OutputItem = MessageItem | ReasoningItem | FunctionCallItem


# ---------------------------------------------------------------------- the response


class ResponseFailure(TypedDict):
    code: Literal["server_error"]
    message: str


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class InputTokensDetails(TypedDict):
    cached_tokens: Annotated[
        int, Field(description="found in memory and not computed; 0 in phases that share nothing")
    ]
    cache_write_tokens: Annotated[int, Field(description="0: what is computed may be kept at no charge")]


class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Settings(TypedDict):
    """Fields of a response that repeat fields of its request. Unimplemented fields have a neutral value."""

    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Annotated[bool, Field(description="whether the response is stored once it is complete")]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None


class ResponseObject(Settings):
    """The JSON answer of `/v1/responses`."""

    id: str
    object: Literal["response"]
    created_at: Annotated[int, Field(description="seconds since 1970")]
    completed_at: int | None
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponseUsage | None


class DeletedResponse(TypedDict):
    """The JSON answer of `DELETE /v1/responses/{id}`."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(TypedDict):
    """The JSON answer of `/v1/responses/{id}/input_items`."""

    object: Literal["list"]
    data: Annotated[list[dict[str, Any]], Field(description="the latest first, unless `order` is `asc`")]
    first_id: str
    last_id: str
    has_more: Literal[False]


# ---------------------------------------------------------------------- the stream


EventType = Literal[
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
    "response.completed",
    "response.incomplete",
    "error",
    "response.failed",
]


class ResponseEvent(TypedDict):
    """The `data` of an event in the stream of a response. `type` is the event's name."""

    type: EventType
    sequence_number: Annotated[int, Field(description="counts the stream's events from 0")]
    response: NotRequired[Annotated[ResponseObject, Field(description="first and last events")]]
    output_index: NotRequired[int]
    item: NotRequired[OutputItem]
    item_id: NotRequired[str]
    content_index: NotRequired[Literal[0]]
    part: NotRequired[OutputText | ReasoningText]
    delta: NotRequired[str]
    text: NotRequired[str]
    arguments: NotRequired[str]
    logprobs: NotRequired[list[ChatTokenLogprobs]]
    code: NotRequired[Annotated[str, Field(description="`error`")]]
    message: NotRequired[str]
    param: NotRequired[str | None]
    error: NotRequired[Annotated[ErrorDetail, Field(description="`error`: the same, as in every error")]]
