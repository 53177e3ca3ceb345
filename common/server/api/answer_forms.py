"""Fields for the form of an answer: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, Tag

from common.constrained.grammar import Grammar
from common.errors import InvalidGrammarError
from common.server.api.bodies import BODY, refused
from common.server.api.fields import by_type

Text = Annotated[str, Field(min_length=1)]

JsonSchema = Annotated[
    Annotated[str, Tag("str")] | Annotated[dict[str, Any], Tag("dict")],
    by_type("an object, or the JSON text of one"),
]


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Context manager: name the field at `path` in an InvalidGrammarError that the block raises."""
    try:
        yield
    except InvalidGrammarError as error:
        raise InvalidGrammarError(f"{path}: {error}", param=path) from None


class JsonSchemaFormat(BaseModel):
    """OpenAI's object around a JSON Schema. `name` and `description` are labels: the model is not told of them."""

    model_config = BODY

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema", description="a JSON Schema")
    strict: bool | None = Field(default=None, description="whatever it is, every answer follows the schema")


class ResponseFormat(BaseModel):
    """OpenAI's field `response_format`: the answer is any text, a JSON object, or JSON that follows a schema."""

    model_config = BODY

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = Field(default=None, description="with type `json_schema`")
    schema_: dict[str, Any] | None = Field(
        default=None, alias="schema", description="with type `json_object`: a JSON Schema, as in llama.cpp"
    )
    value: dict[str, Any] | None = Field(default=None, description="another name of `schema`")

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


class StructuredOutputs(BaseModel):
    """vLLM's field `structured_outputs`, the form that an answer must have. Exactly one of its fields `json`,
    `regex`, `choice` and `grammar` is set."""

    model_config = BODY
    places: ClassVar[tuple[str, ...]] = ("structured_outputs",)

    json_: JsonSchema | None = Field(
        default=None, alias="json", description="a JSON Schema, or its JSON text"
    )
    regex: str | None = Field(
        default=None, description="in the syntax of Rust's regex; matches the whole answer"
    )
    choice: Annotated[list[Text], Field(min_length=1, fail_fast=True)] | None = Field(
        default=None, description="the answer is one of these"
    )
    grammar: str | None = Field(default=None, description="in Lark's notation or llama.cpp's (GBNF)")

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
