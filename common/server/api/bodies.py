"""A request's body, from bytes on the wire to a checked object, each step bounded.

```text
pieces ──> Bodies.read_json ──> parse ──> Body
           400, 415: not JSON   400, 404, 422: an ApiError that names the field
           408, 413: too late,  at fault, if one is
           too long
```
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import PrivateAttr, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import Request

from common.server.api.fields import Fields, review
from common.server.errors import ApiError, refused, shorten

MAX_BODY_BYTES = 2 * 1024 * 1024

#: Most JSON values in a large body (`Admission.LARGE_BODY_BYTES`), and most lists and objects among the values. The
#: validator holds the interpreter's lock. It takes up to a tenth of a microsecond for a value, and three
#: microseconds for a list or an object.
MAX_VALUES = 2**18
MAX_CONTAINERS = 2**13

#: Words of a body that refers to stored responses or their items.
REFERENCES = (b"previous_response_id", b"item_reference")

_SYNTAX_ERRORS = frozenset({"json_invalid", "missing", "union_tag_not_found", "finite_number"})

#: Codes of errors by pydantic's type of error.
_CODES = {"json_invalid": "invalid_json", "missing": "missing_field", "union_tag_not_found": "missing_field"}


@dataclass(frozen=True, slots=True)
class Limits:
    """This server's bounds on the values of a request."""

    models: tuple[str, ...]  # names of the served model; answers have the first
    max_choices: int  # of one request: as many as the queue has places
    vocab_size: int
    strict_fields: bool = False  # unknown fields are refused, not ignored


class Bodies:
    """Reads request bodies: each within `timeout_s` after its head, and the large ones at a rate that they share.

    The event loop copies and scans every byte, and clients that send bodies as fast as they can would take its
    time. While a large body waits for its turn, its connection is not read.
    """

    BYTES_PER_S = 8 * 2**20  # of all large bodies together
    FREE_BYTES = 64 * 1024  # of each body, which count nothing

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()  # of a large body to take its next bytes

    async def read_json(self, request: Request) -> bytes:
        """Read and return the body of a request. Its content type must be JSON.

        Raises:
            ApiError: 400, the content type is not JSON; 408, the body was not complete in time; 413, as soon as the
                body is known to be too large; 415, the body is compressed.
            ClientDisconnect: the client left before the body was complete.
        """
        _require_json(request)
        declared = request.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
            raise too_large()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._read(request)
        except TimeoutError:
            late = f"the body did not come within {self._timeout_s:g} s"
            # On an open connection, the rest of the body would be parsed until the next request.
            raise ApiError(408, late, code="body_timeout", headers={"Connection": "close"}) from None

    async def _read(self, request: Request) -> bytes:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise too_large()
            if len(body) > self.FREE_BYTES:
                async with self._turn:
                    await asyncio.sleep(len(chunk) / self.BYTES_PER_S)
        return bytes(body)


def too_large(what: str = "the body") -> ApiError:
    return ApiError(
        413, f"{what} is over {MAX_BODY_BYTES} bytes, the most this server reads", code="body_too_large"
    )


def says_json(request: Request) -> bool:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return media_type == "application/json"


def _require_json(request: Request) -> None:
    """Raise ApiError if the body of a request is not JSON by its header (400), or if it is compressed (415).

    A web page can make a browser send text to any port of the user's machine, but JSON only if the server at that
    port allows the page to.
    """
    if not says_json(request):
        raise ApiError(
            400,
            "the body must be JSON; send it with Content-Type: application/json",
            code="invalid_content_type",
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(
            415,
            f"the body is in the encoding {shorten(encoding, 40)!r}; send it without Content-Encoding",
            code="unsupported_encoding",
        )


class Body(Fields):
    """A request's body. For every field that has a default, null means that default."""

    # Each unknown field's path in the body, by the path without numbers (`review`).
    _ignored: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def ignored(self) -> Mapping[str, str]:
        return self._ignored

    def complete(self, request: Request) -> None:
        """Fetch the stored items that the body of a request refers to. Most bodies refer to none.

        Raises:
            ApiError: there is no such item.
        """

    def check(self, limits: Limits) -> None:
        """Refuse a well-formed body that cannot be served.

        Raises:
            ApiError: 404, the body names a model that is not served; 422, any other field cannot be served.
        """


BodyT = TypeVar("BodyT", bound=Body)


def parse(body: bytes, form: type[BodyT], limits: Limits, request: Request | None = None) -> BodyT:
    """Parse, complete and check a request's body, and return it as a `form`.

    Raises:
        ApiError: 400, the body is not JSON, lacks a field, has a field of a wrong type, or an invalid `prompt`;
            404 and 422, as `Body.check`.
    """
    try:
        parsed = form.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error, body) from None
    review(parsed, parsed._ignored, strict=limits.strict_fields)
    if request is not None:
        parsed.complete(request)
    parsed.check(limits)
    return parsed


def refuse_too_many_values(body: bytes) -> None:
    """Refuse a body whose validation would take too long, however few its bytes are.

    Counting takes milliseconds for two megabytes. Commas and brackets in strings are not counted: they are text.

    Raises:
        ApiError: 413, the body has more than `MAX_VALUES` values, or more than `MAX_CONTAINERS` lists and objects.
    """
    if body.count(b",") + body.count(b"[") + body.count(b"{") <= MAX_CONTAINERS:  # in strings, too
        return
    without_escapes = body.replace(rb"\\", b"").replace(rb"\"", b"")
    values = without_escapes.count(b'"') // 4  # at the least: a key and its text have two quotes each
    containers = 0
    if values <= MAX_VALUES:
        structure = b"".join(without_escapes.split(b'"')[::2])
        containers = structure.count(b"[") + structure.count(b"{")
        values = structure.count(b",") + containers
    if values > MAX_VALUES or containers > MAX_CONTAINERS:
        raise ApiError(
            413,
            f"the body holds more than {MAX_VALUES} values, or more than {MAX_CONTAINERS} lists and objects; "
            "send several smaller requests",
            code="body_too_complex",
        )


def check_model(model: str | None, limits: Limits) -> None:
    """Raise ApiError (404) if `model` is no name of the served model; None stands for that model."""
    if model is not None and model not in limits.models:
        raise ApiError(
            404,
            f"model {shorten(model, 100)!r} is not served here; "
            f"this server has {' and '.join(map(repr, limits.models))}",
            param="model",
            code="model_not_found",
        )


def _explain(error: ValidationError, body: bytes) -> ApiError:
    """Return the ApiError for a body's worst mistake: an object of a type that is not implemented, such as an
    image; else the first mistake in syntax or type; else the first mistake."""
    details = error.errors(include_url=False, include_input=False)
    other = next((each for each in details if _is_other_type(each)), None)
    worst = other or next((each for each in details if _is_syntax(each)), details[0])
    kind, message, context = worst["type"], worst["msg"], worst.get("ctx", {})
    path, value = ([], None) if kind == "json_invalid" else _find(worst, from_json(body))
    if kind.startswith("union_tag"):  # the object's type is missing or unknown
        path.append("type")
        message = "Field required"
    where = "".join(f"[{part}]" if type(part) is int else f".{shorten(str(part), 100)}" for part in path)
    where = where.removeprefix(".")
    if other is not None:
        types = context.get("expected_tags") or context["expected"]
        given = shorten(str(context.get("tag", value)), 40)
        return refused(where, f"{given!r} is refused; implemented: {types}")
    return ApiError(
        400 if _is_syntax(worst) else 422,
        f"{where}: {message}" if where else message,
        param=str(path[0]) if path else None,
        code=_CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value"),
    )


def _find(detail: ErrorDetails, body: Any) -> tuple[list[str | int], Any]:
    """Return the path in `body` of the value that a mistake is in, and the value.

    pydantic's location also has the tags of unions, which are no keys of an object and mean nothing to a client.
    """
    path: list[str | int] = []
    value = body
    for part in detail["loc"]:
        if (isinstance(value, dict) and part in value) or (isinstance(value, list) and isinstance(part, int)):
            value = value[part]  # type: ignore[index]  # the kind of its index was checked
            path.append(part)
    if detail["type"] == "missing":
        path.append(detail["loc"][-1])
    return path, value


def _is_other_type(detail: ErrorDetails) -> bool:
    """Return whether a mistake is an object whose field `type` names a type that is not implemented."""
    return detail["type"] == "union_tag_invalid" or (
        detail["type"] == "literal_error" and detail["loc"][-1] == "type"
    )


def _is_syntax(detail: ErrorDetails) -> bool:
    """Return whether a mistake is in syntax or type (400) rather than in a value (422). A missing field counts as
    syntax, and so does any mistake in `prompt`, such as a negative token id."""
    kind = detail["type"]
    if kind in _SYNTAX_ERRORS or kind.endswith(("_type", "_parsing")):
        return True
    return detail["loc"][:1] == ("prompt",)
