"""A request's body, from bytes on the wire to a checked object, each step bounded.

```text
pieces ──> read_json ─────────> parse ──> Body
           400, 415: not JSON   400, 404, 422: an ApiError that names the field
           408, 413: too late,  at fault, if one is
           too long
```

Its fields, and those of the objects in it:

```text
a field of the body's class        implemented
  in UNIMPLEMENTED                 ignoring it would change the answer: refused, except at neutral values
  in HINTS                         changes no answer: accepted with any value
  in OTHER_FORMS                   the same as a field of `structured_outputs`
  anything else                    ignored, and named in the log and in the header x-infer-ignored;
                                   with --strict-fields, refused
```
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, PrivateAttr, Tag, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import Request

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


async def read_json(request: Request, timeout_s: float) -> bytes:
    """Read and return the body of a request, within `timeout_s` after its head. Its content type must be JSON.

    Raises:
        ApiError: 400, the content type is not JSON; 408, the body was not complete in time; 413, as soon as the
            body is known to be too large; 415, the body is compressed.
        ClientDisconnect: the client left before the body was complete.
    """
    _require_json(request)
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise too_large()
    except TimeoutError:
        late = f"the body did not come within {timeout_s:g} s"
        # On an open connection, the rest of the body would be parsed until the next request.
        raise ApiError(408, late, code="body_timeout", headers={"Connection": "close"}) from None
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


# ---------------------------------------------------------------------- fields: known, unimplemented, unknown


class Unimplemented(NamedTuple):
    """A field that is not implemented."""

    reason: str  # why it is refused, and what to send instead if there is anything
    neutral: tuple[Any, ...] = ()  # values that ask for nothing, as null always does: they are not refused


OLD_TOOLS = "the older form of tools; send tools, tool_choice and tool_calls instead"
_WRITES_TEXT = "answers are text"
_READS_TEXT = "this server reads text only"
_STRUCTURED = "structured_outputs has answers of a form"
_ONE_ANSWER = "completions and chat have it"
_NOTHING_STORED = "send the items themselves as input"
_SAYS_SCHEMA = "the model chooses white space, and a schema says the rest"

#: Fields whose values would change the answer, by the places that have them (`places` of bodies and objects) and by
#: name. The table in `docs/http-api.md` is made from this one.
UNIMPLEMENTED: Mapping[str, Mapping[str, Unimplemented]] = {
    "all bodies": {
        "audio": Unimplemented(_WRITES_TEXT),
        "function_call": Unimplemented(OLD_TOOLS, ("none", "auto")),
        "functions": Unimplemented(OLD_TOOLS, ([],)),
        "logits_processors": Unimplemented("clients cannot send code", ([],)),
        "modalities": Unimplemented(_WRITES_TEXT, (["text"],)),
        "repetition_detection": Unimplemented("frequency_penalty works against repetition"),
        "return_token_offsets": Unimplemented("logprobs has text_offset", (False,)),
        "return_tokens_as_token_ids": Unimplemented("return_token_ids has the ids", (False,)),
        "structural_tag": Unimplemented(_STRUCTURED),
        "thinking_token_budget": Unimplemented("the model decides how long it thinks", (-1,)),
        "use_beam_search": Unimplemented("tokens are sampled; temperature 0 is greedy", (False,)),
        "web_search_options": Unimplemented("the web is not searched"),
    },
    "completions": {
        "prompt_embeds": Unimplemented("prompts are text or token ids"),
        "suffix": Unimplemented("text is not inserted, only continued", ("",)),
    },
    "conversations": {
        "chat_template": Unimplemented("the template comes with the model"),
        "documents": Unimplemented("put documents into a message", ([],)),
        "include_reasoning": Unimplemented("thoughts have their own field", (True,)),
    },
    "responses, Anthropic's messages": {
        "echo": Unimplemented(_ONE_ANSWER, (False,)),
        "n": Unimplemented("there is one answer; completions and chat have n", (1,)),
        "prompt_logprobs": Unimplemented(_ONE_ANSWER),
        "return_token_ids": Unimplemented(_ONE_ANSWER, (False,)),
    },
    "responses": {
        "background": Unimplemented("a response is not computed later: stream it", (False,)),
        "conversation": Unimplemented(_NOTHING_STORED),
        "image": Unimplemented(_READS_TEXT, ({},)),
        "previous_input_messages": Unimplemented(_NOTHING_STORED),
        "prompt": Unimplemented(_NOTHING_STORED),
    },
    "messages": {
        "audio": Unimplemented(_READS_TEXT),
        "function_call": Unimplemented(OLD_TOOLS),
    },
    "structured_outputs": {
        "disable_additional_properties": Unimplemented(_SAYS_SCHEMA, (False,)),
        "disable_any_whitespace": Unimplemented(_SAYS_SCHEMA, (False,)),
        "json_object": Unimplemented('response_format with type "json_object" does this', (False,)),
        "structural_tag": Unimplemented("send json, regex, choice or grammar"),
        "whitespace_pattern": Unimplemented(_SAYS_SCHEMA),
    },
}

#: Names of fields of OpenAI's and vLLM's requests that change no answer of this server, by place.
HINTS: Mapping[str, frozenset[str]] = {
    place: frozenset(names.split())
    for place, names in {
        "everywhere": "annotations cache_control prompt_cache_breakpoint refusal",
        "all bodies": "access_programs background_options client_metadata context_management ec_transfer_params "
        "enable_response_messages guided_decoding_backend guided_whitespace_pattern kv_transfer_params "
        "length_penalty media_io_kwargs max_tool_calls mm_processor_kwargs moderation prompt_cache_options "
        "prompt_cache_retention request_id service_tier spaces_between_special_tokens vllm_xargs",
        "conversations": "best_of return_assistant_tokens_mask return_prompt_text",
        "Anthropic's messages": "container diagnostics inference_geo speed user_profile_id workspace_id",
        "reasoning": "context generate_summary mode summary",
        "items": "caller",
        "tools of Anthropic's messages": "allowed_callers defer_loading eager_input_streaming",
        "tools of responses": "allowed_callers async defer_loading output_schema",
        "stream_options": "include_obfuscation",
        "structured_outputs": "disable_fallback",
    }.items()
}

#: Other servers' fields for the form of an answer, and the fields of `structured_outputs` that they mean: those of
#: vLLM before 0.12, of SGLang, and of llama.cpp. Bodies for text have them.
OTHER_FORMS: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}

#: Most names of ignored fields in one answer's header, and most characters of a name.
MOST_NAMES = 16
MOST_CHARACTERS = 60

_PLAIN = frozenset({type(None), bool, int, float, str, dict})  # types of values that have no fields


class Fields(BaseModel):
    """Base class of a request's body, and of the objects in it. The text below a field is its description in the
    OpenAPI document."""

    # Strict: "5" is not 5, and true is not 1. Unknown fields are kept, so that `review` can name them.
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow", use_attribute_docstrings=True)
    places: ClassVar[tuple[str, ...]] = ()  # of `UNIMPLEMENTED` and `HINTS`


def review(body: Fields, ignored: dict[str, str], *, strict: bool = False, prefix: str = "") -> None:
    """Check the fields of a validated body, and of the objects in it, that are not implemented.

    Args:
        body: the body, or the object in it at the path `prefix`, which ends with a dot.
        ignored: gets the path of each unknown field's first place in the body (`messages[0].color`), by the path
            without numbers (`messages[].color`), up to `MOST_NAMES` fields.
        strict: unknown fields are refused instead.

    Raises:
        ApiError: 422, a field of `UNIMPLEMENTED` has no neutral value, or, if `strict`, a field is unknown.
    """
    known, hints = _lines_for(type(body))
    extra = body.model_extra or {}
    for name in known.keys() & body.model_fields_set if known else ():
        value = extra[name] if name in extra else getattr(body, name)
        _require_neutral(f"{prefix}{name}", value, known[name])
    for name in extra:
        if name in known or name in hints:
            continue
        if strict:
            path = prefix + shorten(name, 100)
            raise ApiError(422, f"{path}: unknown field", param=path, code="unknown_field")
        note(ignored, prefix, name)
    for name, value in body.__dict__.items():  # the fields of the body's class
        if type(value) in _PLAIN:  # much faster than pydantic's `isinstance`
            continue
        if isinstance(value, Fields):
            review(value, ignored, strict=strict, prefix=f"{prefix}{name}.")
        elif isinstance(value, list):
            for number, item in enumerate(value):
                if not isinstance(item, Fields):  # a list of plain values: however long, it has no fields
                    break
                review(item, ignored, strict=strict, prefix=f"{prefix}{name}[{number}].")


def note(ignored: dict[str, str], prefix: str, name: str) -> None:
    """Add an ignored field to `ignored`, unless that is full: see `review`."""
    if len(ignored) >= MOST_NAMES:
        return
    # Names that a client made up are written into a header and into the log.
    path = prefix + re.sub(r"[^\w.$-]", "?", shorten(name, MOST_CHARACTERS), flags=re.ASCII)
    ignored.setdefault(re.sub(r"\[\d+\]", "[]", path), path)


@functools.cache
def _lines_for(form: type[Fields]) -> tuple[Mapping[str, Unimplemented], frozenset[str]]:
    """Return the lines of `UNIMPLEMENTED` for the places that a class has, and the names of `HINTS` and
    `OTHER_FORMS`."""
    known = {name: line for place in form.places for name, line in UNIMPLEMENTED.get(place, {}).items()}
    forms = OTHER_FORMS if "all bodies" in form.places else ()
    return known, frozenset(forms).union(*(HINTS.get(place, ()) for place in ("everywhere", *form.places)))


def _require_neutral(path: str, value: Any, known: Unimplemented) -> None:
    """Raise ApiError (422) if `value` is neither null nor a neutral value of the field at `path`."""
    if value is None or any(_same_json(value, each) for each in known.neutral):
        return
    neutral = ", ".join(json.dumps(each) for each in known.neutral)
    instead = f"send {neutral} or null, or leave it out" if neutral else "send null, or leave it out"
    shown = f"{shorten(json.dumps(value), 40)} is refused: " if isinstance(value, str | int | float) else ""
    raise ApiError(422, f"{path}: {shown}{known.reason}; {instead}", param=path, code="invalid_value")


def _same_json(value: Any, neutral: Any) -> bool:
    """True if both are the same JSON value. In Python 0 equals False and 1 equals True; in JSON they differ."""
    return bool(value == neutral) and isinstance(value, bool) is isinstance(neutral, bool)


# ---------------------------------------------------------------------- values of several types


#: An id or a name that a client chooses, and that changes no answer.
Label = Annotated[str, Field(max_length=256)]

#: The values of a union that `by_type` tells apart: a text, and a list of parts.
OneText = Annotated[str, Tag("str")]
PartT = TypeVar("PartT")
Parts = Annotated[list[PartT], Field(max_length=256, fail_fast=True), Tag("list")]


def by_type(expected: str) -> Discriminator:
    """Return a discriminator that tags a value with the name of its Python type, such as `str` or `list`.

    Without it, pydantic would try all types of a union, and report the mistakes in a long list once for each.
    """
    return Discriminator(
        lambda value: type(value).__name__,
        custom_error_type="union_type",
        custom_error_message=f"Input should be {expected}",
    )


# ---------------------------------------------------------------------- a body


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
    """Return whether a mistake is the `type` of an object that is not implemented."""
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
