"""The OpenAPI document: what FastAPI knows of the routes, and the bodies that they read and write themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from common.engine import Engine
from common.server.schemas.completion import CompletionRequest
from common.server.schemas.parsing import MAX_BODY_BYTES
from common.server.schemas.replies import (
    CacheReset,
    Completion,
    CompletionEvent,
    ErrorResponse,
    Health,
    ModelList,
    TelemetrySnapshot,
    Version,
)

_ERRORS: dict[str, dict[int, str]] = {
    "/v1/completions": {
        400: "Not JSON, a field missing or of a wrong type, an empty prompt, a token id that does not exist",
        413: f"The body is over {MAX_BODY_BYTES} bytes",
        422: "A value out of range, an unknown field, another model's name, a prompt too long for the server, "
        "a grammar that cannot be followed",
        500: "A failure of the server",
        503: "The queue is full, the server is shutting down, or its engine is dead",
    },
    "/v1/models": {},
    "/health": {503: "The server is shutting down, or its engine is dead"},
    "/version": {},
    "/reset_prefix_cache": {503: "The server is shutting down, or its engine is dead"},
    "/telemetry": {400: "since_step is not an integer", 422: "since_step is out of range"},
}

_ANSWERS: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/completions": (Completion, "The choices, complete, or an event stream of their tokens"),
    "/v1/models": (ModelList, "The served model"),
    "/health": (Health, "Requests are taken"),
    "/version": (Version, "What runs here"),
    "/reset_prefix_cache": (CacheReset, "What nobody used is forgotten"),
    "/telemetry": (TelemetrySnapshot, "Counters and a page of steps"),
}

_STREAM = {
    "itemSchema": {  # what each event is, once parsed
        "type": "object",
        "required": ["event", "data"],
        "properties": {
            "event": {"enum": ["token", "done", "error", "usage"]},
            "data": {
                "type": "string",
                "contentMediaType": "application/json",
                "contentSchema": {
                    "anyOf": [
                        {"$ref": "#/components/schemas/CompletionEvent"},
                        {"$ref": "#/components/schemas/ErrorResponse"},
                    ]
                },
            },
        },
    },
    "description": "Server-sent events; every `data` is a JSON object. `token`: one for each sampled token. "
    "`done` or `error`: exactly one for each choice, its last. `usage`: last of all, if asked for.",
    "example": 'event: token\ndata: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":'
    '[{"index":0,"text":"Hello","logprobs":null,"finish_reason":null}],"token":"Hello","token_id":9906}\n\n'
    'event: done\ndata: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":'
    '[{"index":0,"text":"","logprobs":null,"finish_reason":"length"}],"finish_reason":"length",'
    '"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2,'
    '"prompt_tokens_details":{"cached_tokens":0}}}\n\n',
}

_RETRY_AFTER = {"Retry-After": {"description": "seconds", "schema": {"type": "integer"}}}


def openapi_document(app: FastAPI, engine: Engine, model_name: str) -> dict[str, Any]:
    """The document of an app that serves `engine`'s model under `model_name`; made once."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    document = get_openapi(
        title=app.title, summary=app.summary, version=app.version, routes=app.routes, openapi_version="3.1.0"
    )
    schemas: dict[str, Any] = {}

    def reference(model: type[BaseModel]) -> dict[str, Any]:
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
        return {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}

    for path, (model, description) in _ANSWERS.items():
        operation = next(iter(document["paths"][path].values()))
        content = {"application/json": reference(model)}
        if path == "/v1/completions":
            reference(CompletionEvent)
            content["text/event-stream"] = _STREAM
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": reference(CompletionRequest)},
            }
        responses: dict[str, Any] = {"200": {"description": description, "content": content}}
        for status, reason in _ERRORS[path].items():
            responses[str(status)] = {
                "description": reason,
                "content": {"application/json": reference(ErrorResponse)},
                **({"headers": _RETRY_AFTER} if status == 503 else {}),
            }
        operation["responses"] = responses
    _add_limits(schemas["CompletionRequest"]["properties"], engine, model_name)
    document["components"] = {"schemas": schemas}
    app.openapi_schema = document
    return document


def _add_limits(properties: dict[str, Any], engine: Engine, model_name: str) -> None:
    """What this server's model and options make of a request's fields."""
    properties["model"]["const"] = model_name
    properties["max_tokens"]["anyOf"][0]["maximum"] = engine.max_seq_len - 1
    _, tokens, _, token_lists = properties["prompt"]["oneOf"]
    stop_tokens = properties["stop_token_ids"]["anyOf"][0]
    for array in (tokens, token_lists["items"], stop_tokens):
        array["items"]["maximum"] = engine.runner.model.config.vocab_size - 1
        array["maxItems"] = min(engine.max_seq_len - 1, array.get("maxItems", engine.max_seq_len))
