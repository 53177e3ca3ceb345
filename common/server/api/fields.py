"""Fields of requests: those that are known and not implemented, unknown ones, and those for an answer's form.

```text
a field of the body's class        implemented
  in UNIMPLEMENTED                 ignoring it would change the answer: refused, except at neutral values
  in HINTS                         changes no answer: accepted with any value
  anything else                    ignored, and named in the log and in the header x-infer-ignored;
                                   with --strict-fields, refused
```
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from common.constrained.grammar import Grammar
from common.errors import InvalidGrammarError
from common.server.errors import ApiError, refused, shorten


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
        "ebnf": Unimplemented(_STRUCTURED),
        "function_call": Unimplemented(OLD_TOOLS, ("none", "auto")),
        "functions": Unimplemented(OLD_TOOLS, ([],)),
        "grammar": Unimplemented(_STRUCTURED, ("",)),
        "guided_choice": Unimplemented(_STRUCTURED),
        "guided_grammar": Unimplemented(_STRUCTURED),
        "guided_json": Unimplemented(_STRUCTURED),
        "guided_regex": Unimplemented(_STRUCTURED),
        "json_schema": Unimplemented(_STRUCTURED, ({},)),
        "logits_processors": Unimplemented("clients cannot send code", ([],)),
        "modalities": Unimplemented(_WRITES_TEXT, (["text"],)),
        "regex": Unimplemented(_STRUCTURED),
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
        "items": "caller encrypted_content",
        "tools of responses": "allowed_callers async defer_loading output_schema",
        "stream_options": "include_obfuscation",
        "structured_outputs": "disable_fallback",
    }.items()
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
        if len(ignored) == MOST_NAMES:
            break
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
    """Add an ignored field to `ignored`: see `review`."""
    # Names that a client made up are written into a header and into the log.
    path = prefix + re.sub(r"[^\w.$-]", "?", shorten(name, MOST_CHARACTERS), flags=re.ASCII)
    ignored.setdefault(re.sub(r"\[\d+\]", "[]", path), path)


@functools.cache
def _lines_for(form: type[Fields]) -> tuple[Mapping[str, Unimplemented], frozenset[str]]:
    """Return the lines of `UNIMPLEMENTED` and the names of `HINTS` for the places that a class has."""
    known = {name: line for place in form.places for name, line in UNIMPLEMENTED.get(place, {}).items()}
    return known, frozenset().union(*(HINTS.get(place, ()) for place in ("everywhere", *form.places)))


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


# ---------------------------------------------------------------------- the form of an answer

Text = Annotated[str, Field(min_length=1)]

JsonSchema = Annotated[
    OneText | Annotated[dict[str, Any], Tag("dict")], by_type("an object, or the JSON text of one")
]


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Context manager: name the field at `path` in an InvalidGrammarError that the block raises."""
    try:
        yield
    except InvalidGrammarError as error:
        raise InvalidGrammarError(f"{path}: {error}", param=path) from None


class JsonSchemaFormat(Fields):
    """OpenAI's object around a JSON Schema. `name` and `description` are labels: the model is not told of them."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    """a JSON Schema"""
    strict: bool | None = None
    """whatever it is, every answer follows the schema"""


class ResponseFormat(Fields):
    """OpenAI's field `response_format`: the answer is any text, a JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    """with type `json_schema`"""
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """with type `json_object`: a JSON Schema, as in llama.cpp"""
    value: dict[str, Any] | None = None
    """another name of `schema`"""

    @property
    def named_grammar(self) -> tuple[str, Grammar] | None:
        """The path of the field that restricts the answer, and the grammar it asks for; None: any text."""
        if self.json_schema is not None:
            path, schema = "response_format.json_schema.schema", self.json_schema.schema_
        elif self.type == "text":
            return None
        else:
            name, wanted = ("schema", self.schema_) if self.value is None else ("value", self.value)
            if not wanted:
                return "response_format", Grammar.json_object()
            path, schema = f"response_format.{name}", wanted
        with naming(path):
            return path, Grammar.json_schema(schema)

    def check(self) -> None:
        """Raise ApiError (422) if type `json_schema` has no schema, or another type has `json_schema`."""
        if (self.type == "json_schema") is not (self.json_schema is not None):
            raise refused(
                "response_format", "json_schema and type 'json_schema' go together; send both or neither"
            )


_GRAMMARS: dict[str, Callable[[Any], Grammar]] = {
    "json": Grammar.json_schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.context_free,
}


class StructuredOutputs(Fields):
    """vLLM's field `structured_outputs`, the form that an answer must have. Exactly one of its fields `json`,
    `regex`, `choice` and `grammar` is set."""

    places: ClassVar[tuple[str, ...]] = ("structured_outputs",)

    json_: JsonSchema | None = Field(default=None, alias="json")
    """a JSON Schema, or its JSON text"""
    regex: str | None = None
    """in the syntax of Rust's regex; matches the whole answer"""
    choice: Annotated[list[Text], Field(min_length=1, fail_fast=True)] | None = None
    """the answer is one of these"""
    grammar: str | None = None
    """in Lark's notation or llama.cpp's (GBNF)"""

    @property
    def named_grammar(self) -> tuple[str, Grammar]:
        """The path of the field that restricts the answer, and the grammar it asks for."""
        ((field, value),) = self._given.items()  # one: see `check`
        path = f"structured_outputs.{field}"
        with naming(path):
            return path, _GRAMMARS[field](value)

    def check(self) -> None:
        """Raise ApiError (422) unless exactly one of the fields json, regex, choice and grammar is given."""
        if len(self._given) != 1:
            raise refused(
                "structured_outputs", f"send one of json, regex, choice, grammar, not {len(self._given)}"
            )

    @property
    def _given(self) -> dict[str, Any]:
        """The fields among `json`, `regex`, `choice` and `grammar` that are not null, by name."""
        fields = {"json": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        return {name: value for name, value in fields.items() if value is not None}
