"""The OpenAPI document: FastAPI's, extended by the bodies that routes parse and write without FastAPI."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, TypeAdapter

from common.engine.requests import EngineFront
from common.server.api.bodies import MAX_BODY_BYTES, Limits
from common.server.api.chat import ChatRequest
from common.server.api.completions import CompletionRequest
from common.server.api.messages import EventType as MessageEventType
from common.server.api.messages import Message, MessageEvent, MessagesRequest, TokenCount
from common.server.api.responses import (
    DeletedResponse,
    EventType,
    InputItems,
    ResponseEvent,
    ResponseObject,
    ResponsesRequest,
)
from common.server.api.shapes import (
    CacheReset,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    CompletionEvent,
    ErrorResponse,
    Health,
    InputTokens,
    MessagesError,
    ModelCard,
    ModelList,
    PlainCompletion,
    Ready,
    TelemetrySnapshot,
    Text,
    Tokens,
    Version,
)
from common.server.api.tokens import DetokenizeRequest, TokenizeRequest
from common.server.errors import SHOULD_RETRY


class NoFields(BaseModel):
    """A body without fields; it may be left out."""

    model_config = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class Stream:
    """Describes the events of an event stream for the OpenAPI document."""

    description: str
    example: str
    data: type[Any]  # the JSON in each event
    names: tuple[str, ...] = ()  # empty: unnamed events, the last of which is `[DONE]`

    def content(self) -> dict[str, Any]:
        data = {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {"anyOf": [_reference(self.data), _reference(ErrorResponse)]},
        }
        item: dict[str, Any] = {"type": "object", "required": ["data"], "properties": {"data": data}}
        if self.names:
            item["required"] = ["event", "data"]
            item["properties"] = {"event": {"enum": list(self.names)}, "data": data}
        else:
            item["properties"] = {"data": {"anyOf": [data, {"const": "[DONE]"}]}}
        return {"itemSchema": item, "description": self.description, "example": self.example}


@dataclass(frozen=True, slots=True)
class Documented:
    """Describes a route's body, answers and errors, which FastAPI does not know, for the OpenAPI document."""

    answer: type[Any]
    description: str
    errors: Mapping[int, str] = field(default_factory=dict)
    body: type[Any] | None = None
    stream: Stream | None = None
    failure: type[Any] = ErrorResponse  # the shape of its errors


_MALFORMED = "Not JSON, a field missing or of a wrong type, an empty prompt, a token id that does not exist"
_REFUSED = (
    "A value out of range, a field that is not implemented, a prompt too long for the server, "
    "a grammar that cannot be followed"
)
_BUSY = "The queue is full, the server is shutting down, or its engine is dead"
_ENDING = "The server is shutting down, or its engine is dead"
_LATE = "The request took longer than the server gives one"
_SLOW = "The body did not come in time"
_FAILURES = {
    408: _SLOW,
    413: f"The body is over {MAX_BODY_BYTES} bytes, has too many values, or comes in too many pieces",
    415: "The body is compressed",
    500: "A failure of the server",
    503: _BUSY,
    504: _LATE,
}
_NO_MODEL = {404: "Another model's name"}
_NATIVE = {400: _MALFORMED, **_NO_MODEL, 422: _REFUSED, **_FAILURES}
_STRICT = {400: f"{_MALFORMED}; {_REFUSED}", **_NO_MODEL, **_FAILURES}
_CHOICES = "The choices, complete, or an event stream of their tokens"
_ANSWERS = "The answers, complete, or an event stream of their tokens"
_RESPONSE = "The response, complete, or an event stream of it"
_TEXT = {
    400: _MALFORMED,
    **_NO_MODEL,
    408: _SLOW,
    413: _FAILURES[413],
    415: _FAILURES[415],
    422: _REFUSED,
    500: _FAILURES[500],
    503: _ENDING,
}

_STRICT_TEXT = {status: text for status, text in _TEXT.items() if status != 422}

_NAMED_EVENTS = Stream(
    "Server-sent events; every `data` is a JSON object. `token`: one for each sampled token. `done` or `error`: "
    "exactly one for each choice, its last. `usage`: last of all, if asked for.",
    'event: token\ndata: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m",'
    '"system_fingerprint":"fp_1","choices":'
    '[{"index":0,"text":"Hello","logprobs":null,"finish_reason":null}],"token":"Hello","token_id":9906}\n\n'
    'event: done\ndata: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m",'
    '"system_fingerprint":"fp_1","choices":'
    '[{"index":0,"text":"","logprobs":null,"finish_reason":"length"}],"finish_reason":"length",'
    '"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2,'
    '"prompt_tokens_details":{"cached_tokens":0},'
    '"completion_tokens_details":{"accepted_prediction_tokens":0,"rejected_prediction_tokens":0,'
    '"reasoning_tokens":0}}}\n\n',
    CompletionEvent,
    names=("token", "done", "error", "usage"),
)
_COMPLETION_CHUNKS = Stream(
    "Server-sent events without names. A chunk for each sampled token; the one with a `finish_reason` is its "
    "choice's last. A chunk without choices has the usage, if asked for. `[DONE]` is last of all.",
    'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m",'
    '"system_fingerprint":"fp_1","choices":'
    '[{"index":0,"text":"Hello","logprobs":null,"finish_reason":"length"}]}\n\ndata: [DONE]\n\n',
    CompletionChunk,
)
_CHAT_CHUNKS = Stream(
    "Server-sent events without names. A choice's first chunk has the role; then a chunk for each sampled token, "
    "and the one with a `finish_reason` is its last. A chunk without choices has the usage, if asked for. `[DONE]` "
    "is last of all.",
    'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m",'
    '"system_fingerprint":"fp_1","choices":'
    '[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
    'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m",'
    '"system_fingerprint":"fp_1","choices":'
    '[{"index":0,"delta":{"content":"Hello"},"logprobs":null,"finish_reason":"length"}]}\n\ndata: [DONE]\n\n',
    ChatCompletionChunk,
)

_RESPONSE_EVENTS = Stream(
    "Server-sent events with the names of their `type`. `response.created` and `response.in_progress` come first; "
    "`response.completed`, `response.incomplete` or `response.failed` comes last.",
    'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number":4,'
    '"item_id":"msg_1_0","output_index":0,"content_index":0,"delta":"Hello","logprobs":[]}\n\n',
    ResponseEvent,
    names=get_args(EventType),
)
_MESSAGE_EVENTS = Stream(
    "Server-sent events with the names of their `type`. `message_start` comes first; `message_stop` or `error` "
    "comes last.",
    'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
    '"delta":{"type":"text_delta","text":"Hello"}}\n\n',
    MessageEvent,
    names=get_args(MessageEventType),
)
_NOT_STORED = {404: "No such response is stored for this key"}
_STORED = Documented(ResponseObject, "The stored response", _NOT_STORED)
_DELETED = Documented(DeletedResponse, "The response is forgotten", _NOT_STORED)
_INPUT_ITEMS = "The items that the response answers"
_MODELS = Documented(ModelList, "The served model")
_MODEL = Documented(ModelCard, "The served model", _NO_MODEL)

#: By path, after the method if the path has several.
ROUTES: dict[str, Documented] = {
    "/v1/completions": Documented(Completion, _CHOICES, _NATIVE, CompletionRequest, _NAMED_EVENTS),
    "/openai/v1/completions": Documented(
        PlainCompletion, _CHOICES, _STRICT, CompletionRequest, _COMPLETION_CHUNKS
    ),
    "/v1/chat/completions": Documented(ChatCompletion, _ANSWERS, _NATIVE, ChatRequest, _CHAT_CHUNKS),
    "/openai/v1/chat/completions": Documented(ChatCompletion, _ANSWERS, _STRICT, ChatRequest, _CHAT_CHUNKS),
    "/v1/responses": Documented(ResponseObject, _RESPONSE, _NATIVE, ResponsesRequest, _RESPONSE_EVENTS),
    "/openai/v1/responses": Documented(
        ResponseObject, _RESPONSE, _STRICT, ResponsesRequest, _RESPONSE_EVENTS
    ),
    "GET /v1/responses/{response_id}": _STORED,
    "GET /openai/v1/responses/{response_id}": _STORED,
    "DELETE /v1/responses/{response_id}": _DELETED,
    "DELETE /openai/v1/responses/{response_id}": _DELETED,
    "/v1/responses/{response_id}/input_items": Documented(
        InputItems, _INPUT_ITEMS, {**_NOT_STORED, 422: "Another `order`"}
    ),
    "/openai/v1/responses/{response_id}/input_items": Documented(
        InputItems, _INPUT_ITEMS, {**_NOT_STORED, 400: "Another `order`"}
    ),
    "/v1/messages": Documented(
        Message,
        "The message, complete, or an event stream of it",
        _STRICT,
        MessagesRequest,
        _MESSAGE_EVENTS,
        MessagesError,
    ),
    "/v1/messages/count_tokens": Documented(
        TokenCount,
        "The number of tokens of the prompt",
        {status: reason for status, reason in _STRICT.items() if status != 504},
        MessagesRequest,
        failure=MessagesError,
    ),
    "/v1/models": _MODELS,
    "/openai/v1/models": _MODELS,
    "/v1/models/{model}": _MODEL,
    "/openai/v1/models/{model}": _MODEL,
    "/v1/responses/input_tokens": Documented(InputTokens, "The number of tokens", _TEXT, ResponsesRequest),
    "/openai/v1/responses/input_tokens": Documented(
        InputTokens, "The number of tokens", _STRICT_TEXT, ResponsesRequest
    ),
    "/apply-template": Documented(Text, "The prompt", _TEXT, ChatRequest),
    "/tokenize": Documented(Tokens, "The token ids", _TEXT, TokenizeRequest),
    "/detokenize": Documented(Text, "The text", _TEXT, DetokenizeRequest),
    "/health": Documented(Health, "The server lives", {503: "The engine is dead"}),
    "/ready": Documented(Ready, "Requests are taken", {503: _ENDING}),
    "/version": Documented(Version, "What runs here"),
    "/reset_prefix_cache": Documented(
        CacheReset,
        "What nobody used is forgotten",
        {
            400: "The body is neither empty nor an empty object, or is not sent as JSON",
            408: _SLOW,
            413: _FAILURES[413],
            503: _ENDING,
        },
        NoFields,
    ),
    "/telemetry": Documented(
        TelemetrySnapshot,
        "Counters and a page of steps",
        {400: "since_step is not an integer", 422: "since_step is out of range"},
    ),
}

_RETRY_AFTER = {"Retry-After": {"description": "seconds", "schema": {"type": "integer"}}}
_NO_RETRY = {SHOULD_RETRY: {"description": "the same would happen again", "schema": {"const": "false"}}}
_HEADERS = {500: _NO_RETRY, 503: _RETRY_AFTER, 504: _NO_RETRY}


def openapi_document(
    app: FastAPI, engine: EngineFront, limits: Limits, root_path: str = ""
) -> dict[str, Any]:
    """Return the OpenAPI document of an app. It is made at the first call and kept in `app.openapi_schema`.

    Args:
        app: the app.
        engine: its engine, whose longest sequence bounds fields such as `max_tokens`.
        limits: the server's bounds on the values of a request.
        root_path: prefix of all paths, which the document names as its server; empty: none.
    """
    if app.openapi_schema is not None:
        return app.openapi_schema
    document = get_openapi(
        title=app.title,
        summary=app.summary,
        version=app.version,
        routes=app.routes,
        openapi_version="3.1.0",
        servers=[{"url": root_path}] if root_path else None,
    )
    models: set[type[Any] | None] = {ErrorResponse, MessagesError}
    for name, route in ROUTES.items():
        method, _, path = name.rpartition(" ")
        operations = document["paths"][path]
        operation = operations[method.lower()] if method else next(iter(operations.values()))
        _describe(operation, route)
        models |= {route.answer, route.body, None if route.stream is None else route.stream.data}
    schemas = _schemas(model for model in models if model is not None)
    # Its other limits do not hold for a count of tokens.
    schemas["MessagesRequest"]["properties"]["model"]["anyOf"][0]["enum"] = list(limits.models)
    for name in ("CompletionRequest", "ChatRequest", "ResponsesRequest"):
        _add_limits(schemas[name]["properties"], engine, limits)
    schemas["CompletionRequest"]["properties"]["max_tokens"]["anyOf"][0]["maximum"] = engine.max_seq_len - 1
    _, tokens, _, token_lists = schemas["CompletionRequest"]["properties"]["prompt"]["oneOf"]
    for array in (tokens, token_lists["items"]):
        _bound(array, engine.max_seq_len - 1, limits)
    _bound(schemas["DetokenizeRequest"]["properties"]["tokens"], None, limits)
    document["components"] = {"schemas": schemas}
    app.openapi_schema = document
    return document


def _describe(operation: dict[str, Any], route: Documented) -> None:
    """Add a route's body, answers and errors to `operation`, its OpenAPI operation object."""
    content = {"application/json": {"schema": _reference(route.answer)}}
    if route.stream is not None:
        content["text/event-stream"] = route.stream.content()
    if route.body is not None:
        body = {"application/json": {"schema": _reference(route.body)}}
        operation["requestBody"] = {"required": route.body is not NoFields, "content": body}
    responses: dict[str, Any] = {"200": {"description": route.description, "content": content}}
    for status, reason in route.errors.items():
        responses[str(status)] = {
            "description": reason,
            "content": {"application/json": {"schema": _reference(route.failure)}},
            **({"headers": _HEADERS[status]} if status in _HEADERS else {}),
        }
    operation["responses"] = responses


def _reference(model: type[Any]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _schemas(models: Iterable[type[Any]]) -> dict[str, Any]:
    """Return the JSON Schemas of these classes, and of the classes that they refer to, by the name of the class."""
    schemas: dict[str, Any] = {}
    for model in sorted(models, key=lambda each: each.__name__):
        schema = TypeAdapter(model).json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {}) | {model.__name__: schema}
    return schemas


def _add_limits(properties: dict[str, Any], engine: EngineFront, limits: Limits) -> None:
    """Add this server's limits to `properties`, the JSON Schemas of a body's fields."""
    properties["model"]["anyOf"][0]["enum"] = list(limits.models)
    _bound(properties["stop_token_ids"]["anyOf"][0], engine.max_seq_len - 1, limits)


def _bound(array: dict[str, Any], length: int | None, limits: Limits) -> None:
    """Add bounds to `array`, the JSON Schema of a list of token ids.

    The ids are bounded by the vocabulary, and their number by `length` (None: the number gets no bound).
    """
    array["items"]["maximum"] = limits.vocab_size - 1
    if length is not None:
        array["maxItems"] = min(length, array.get("maxItems", length))
