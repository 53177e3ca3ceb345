"""Errors as clients see them: one JSON shape for the error answers of all routes.

```json
{"error": {"message": "…", "type": "invalid_request_error", "param": "max_tokens", "code": "invalid_value"}}
```

On the routes of Anthropic's API, `"type": "error"` and the request's id stand beside `error`, whose type is one of
Anthropic's.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal, NotRequired

import orjson
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from typing_extensions import TypedDict

from common.errors import (
    ContextLengthError,
    EngineDeadError,
    GrammarFailedError,
    InvalidPromptError,
    InvalidRequestError,
    NaNLogitsError,
    NoTokenLeftError,
    QueueFullError,
    RequestTimeoutError,
    ShuttingDownError,
)

MAX_MESSAGE_CHARACTERS = 800  # four bytes a character and some quoting stay under 4 kB

#: Prefix of the routes whose answers are exactly like OpenAI's, statuses included.
STRICT_PREFIX = "/openai/"

#: The first of Anthropic's routes, and the beginning of the others.
MESSAGES_PATH = "/v1/messages"

SHOULD_RETRY = "x-should-retry"  # header: whether OpenAI's libraries should send the request again

INVALID_REQUEST = "invalid_request_error"
OVERLOADED = "overloaded_error"
UNAVAILABLE = "unavailable_error"
SERVER_ERROR = "server_error"

#: Anthropic's types of errors by status. Other statuses have `invalid_request_error`.
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    500: "api_error",
    503: OVERLOADED,
    504: "timeout_error",
}


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(TypedDict):
    """The JSON body of an error, the same on all routes but Anthropic's."""

    error: ErrorDetail


class MessagesErrorDetail(ErrorDetail):
    details: NotRequired[Mapping[str, object]]


class MessagesError(TypedDict):
    """The JSON body of an error on Anthropic's routes."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str | None


class ApiError(Exception):
    """An error that a client is answered with.

    Args:
        status: HTTP status (see `status_at`); not sent if the answer has begun already.
        message: text for people, without the server's internals.
        type: the kind of error, for programs.
        param: the request's field at fault; None: no single field is.
        code: the exact error, for programs.
        headers: of the answer.
        details: more for programs, in answers of Anthropic's API only.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID_REQUEST,
        param: str | None = None,
        code: str,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.details = details
        self.status = status
        self.message = shorten(message, MAX_MESSAGE_CHARACTERS)
        self.type = type
        self.param = None if param is None else shorten(param, 100)
        self.code = code
        # OpenAI's libraries repeat a request after any 5xx. After 500 and 504 it would only fail again.
        no_retry = {SHOULD_RETRY: "false"} if status in (500, 504) else {}
        self.headers = {**no_retry, **(headers or {})}

    def body(self) -> ErrorResponse:
        """Return the body of the error's answer, a JSON object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def messages_body(self, request_id: str | None) -> MessagesError:
        """Return the body of the error's answer in Anthropic's form."""
        error: MessagesErrorDetail = {
            "message": self.message,
            "type": _MESSAGES_TYPES.get(self.status, INVALID_REQUEST),
            "param": self.param,
            "code": self.code,
        }
        if self.details is not None:
            error["details"] = self.details
        return {"type": "error", "error": error, "request_id": request_id}


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def shorten(text: str, limit: int) -> str:
    """Cut a text that a client wrote, which may be megabytes long, to at most `limit` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def unavailable(message: str, *, code: str, retry_after_s: int, type: str = UNAVAILABLE) -> ApiError:
    """Return an ApiError (503) with `Retry-After`, the seconds after which a client should try again."""
    return ApiError(503, message, type=type, code=code, headers={"Retry-After": str(retry_after_s)})


def refused(param: str, message: str, details: Mapping[str, object] | None = None) -> ApiError:
    """Return the ApiError (422) for a value of the field `param` that cannot be served."""
    return ApiError(422, f"{param}: {message}", param=param, code="invalid_value", details=details)


def internal_error() -> ApiError:
    """Return the ApiError (500) for a failure of the server. Details are in the log only."""
    return ApiError(500, "the server failed on this request", type=SERVER_ERROR, code="internal_error")


def status_at(path: str, error: ApiError) -> int:
    """Return the HTTP status of an error on the route `path`.

    The server's own routes tell a malformed request (400) from one that cannot be served (422). OpenAI and
    Anthropic answer 400 to both, and so do their routes here.
    """
    strict = path.startswith(STRICT_PREFIX) or is_anthropics(path)
    return 400 if error.status == 422 and strict else error.status


def is_anthropics(path: str) -> bool:
    """Return whether a route belongs to Anthropic's API."""
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


def error_response(path: str, error: ApiError, request_id: str | None) -> Response:
    """Return the answer to a request on the route `path` that ends with `error`."""
    body = error.messages_body(request_id) if is_anthropics(path) else error.body()
    return json_response(body, status_at(path, error), error.headers)


def from_exception(error: Exception) -> ApiError:
    """Return the ApiError for an exception that the engine raised, or ended a request with.

    An unexpected exception becomes a 500 without details.
    """
    match error:
        case ApiError():
            return error
        case InvalidPromptError():
            return ApiError(400, str(error), param=error.param, code="invalid_prompt")
        case ContextLengthError():
            return ApiError(422, str(error), param=error.param, code="context_length_exceeded")
        case InvalidRequestError():
            return ApiError(422, str(error), param=error.param, code="invalid_value")
        case QueueFullError():
            return unavailable(str(error), code="queue_full", retry_after_s=1, type=OVERLOADED)
        case ShuttingDownError():
            return unavailable(str(error), code="shutting_down", retry_after_s=5)
        case RequestTimeoutError():
            return ApiError(504, str(error), type=UNAVAILABLE, code="request_timeout")
        case EngineDeadError():
            return unavailable(str(error), code="engine_dead", retry_after_s=30)
        case GrammarFailedError():
            return ApiError(422, str(error), code="grammar_failed")
        case NoTokenLeftError():
            return ApiError(422, str(error), code="no_token_left")
        case NaNLogitsError():
            return ApiError(500, str(error), type=SERVER_ERROR, code="nan_logits")
        case _:
            return internal_error()


# ---------------------------------------------------------------------- as answers


async def answer_api_error(request: Request, error: Exception) -> Response:
    refusal = from_exception(error)
    request.state.error_code = refusal.code  # for the count of answers
    return error_response(request.url.path, refusal, getattr(request.state, "request_id", None))


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Answer an error of the web framework, such as 404 (no such route) or 405 (the route lacks the method)."""
    assert isinstance(error, HTTPException)  # the handler is registered for these
    message = {
        404: f"there is no such route; {_route_meant_by(request)}",
        405: f"this route has no method {request.method}",
    }
    headers = dict(error.headers or {})
    if "GET" in headers.get("Allow", ""):
        headers["Allow"] += ", HEAD"  # `create_app` adds it to each route that has GET
    api_error = ApiError(
        error.status_code,
        message.get(error.status_code, str(error.detail)),
        code={404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error"),
        headers=headers,
    )
    return await answer_api_error(request, api_error)


#: Hints for requests to routes of other servers, by the end of the path.
_ELSEWHERE = {
    "/embeddings": "embeddings are not served: this server's models write text. Run an embedding model beside it, "
    "with llama.cpp's llama-server --embedding or Hugging Face's text-embeddings-inference",
    "/batches": "batches are not served: send the requests at the same time, and they are computed together",
    "/docs": "the routes are described in /openapi.json, and the page at / has a form for chat",
    "/redoc": "the routes are described in /openapi.json, and the page at / has a form for chat",
}


def _route_meant_by(request: Request) -> str:
    """Return a hint for a 404's message: the route that the client may have meant, or where all are listed."""
    path = request.url.path
    for end, hint in _ELSEWHERE.items():
        if path.endswith(end):
            return hint
    if path.startswith("/api/"):
        return (
            "Ollama's API is not served, OpenAI's is: POST /v1/chat/completions, POST /v1/completions and "
            "GET /v1/models"
        )
    near = difflib.get_close_matches(shorten(path, 100), request.app.state.paths, n=1, cutoff=0.8)
    return f"did you mean {near[0]}? See /openapi.json" if near else "see /openapi.json"


async def answer_invalid_query(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # the handler is registered for these
    first = error.errors()[0]
    syntax = first["type"].endswith(("_type", "_parsing", "_size")) or first["type"] == "missing"
    name = str(first["loc"][-1])
    code = "invalid_type" if syntax else "invalid_value"
    refused = ApiError(400 if syntax else 422, f"{name}: {first['msg']}", param=name, code=code)
    return await answer_api_error(request, refused)


async def answer_nobody(_: Request, __: Exception) -> Response:
    """Return a response that nobody reads, since the client has left: a handler must return one. nginx's status for
    this is 499."""
    return Response(status_code=499)


#: The app's error handlers. `from_exception` knows all errors of the engine; a few of them reach a handler, such as
#: those of a server that shuts down.
HANDLERS: dict[int | type[Exception], Callable[[Request, Any], Coroutine[Any, Any, Response]]] = {
    ApiError: answer_api_error,
    ShuttingDownError: answer_api_error,
    EngineDeadError: answer_api_error,
    InvalidRequestError: answer_api_error,
    HTTPException: answer_http_error,
    RequestValidationError: answer_invalid_query,
    ClientDisconnect: answer_nobody,
}
