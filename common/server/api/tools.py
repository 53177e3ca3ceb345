"""Fields that name tools: the functions, which of them may or must be called, and calls in earlier messages.

This module does not depend on the bodies. Each body turns its fields into a `ToolUse` with `tool_use_of`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import to_json

from common.constrained.schemas import size
from common.constrained.tool_calls import Function, ToolUse, call_for_template
from common.errors import InvalidGrammarError
from common.server.api.bodies import Fields, Label
from common.server.errors import refused

logger = logging.getLogger(__name__)


@functools.lru_cache(maxsize=256)
def log_once(message: str) -> None:
    """Log a warning, unless it was logged lately: an agent sends its tools again and again."""
    logger.warning("%s", message)


#: JSON Schema of the arguments of a function without the field `parameters`: it takes no arguments.
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

#: As the Model Context Protocol has it: OpenAI's and Anthropic's names have no dots, and OpenAI's 64 characters.
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class FunctionFields(Fields):
    """The fields of a function that the model may call."""

    name: FunctionName
    description: str | None = None
    """a description for the model"""
    parameters: dict[str, Any] | None = None
    """a JSON Schema of an object; default: the function has no arguments"""
    strict: bool | None = False
    """whether calls follow the schema also where `tool_choice` does not require one"""

    def as_function(self) -> Function:
        parameters = NO_ARGUMENTS if self.parameters is None else self.parameters
        return Function(self.name, self.description, parameters, bool(self.strict))


class FunctionTool(Fields):
    """A tool in the body of chat: a function that the model may call."""

    type: Literal["function"] = "function"
    function: FunctionFields


Tools = Annotated[list[FunctionTool], Field(max_length=128, fail_fast=True)]


class Named(Fields):
    """An object with the name of a function."""

    name: FunctionName


class NamedTool(Fields):
    """A tool that `tool_choice` names."""

    type: Literal["function"] = "function"
    function: Named

    @property
    def called(self) -> str:
        return self.function.name


class AllowedToolsFields(Fields):
    """The tools that may be called, and whether one of them must be called (`mode`)."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=128, fail_fast=True)]


class AllowedTools(Fields):
    """The tools of the body that may be called. The model is told of all tools of the body."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolsFields


#: The description of `tool_choice`.
CHOICE = (
    "`auto`: the model decides; `required`: it calls functions; a function: it calls that one; "
    "`none`: it calls none, and is told of none; default: `auto`"
)


def _choice_form(choice: Any) -> str | None:
    """Return the tag of the type of a `tool_choice`; None: no type fits."""
    if isinstance(choice, dict):
        return "allowed_tools" if choice.get("type") == "allowed_tools" else "function"
    return "str" if isinstance(choice, str) else None


BY_CHOICE = Discriminator(
    _choice_form,
    custom_error_type="tool_choice_type",
    custom_error_message="Input should be 'none', 'auto', 'required', or an object that names functions",
)
Word = Literal["none", "auto", "required"]
ToolChoice = Annotated[
    Annotated[Word, Tag("str")]
    | Annotated[NamedTool, Tag("function")]
    | Annotated[AllowedTools, Tag("allowed_tools")],
    BY_CHOICE,
]


class OtherTool(Fields):
    """A tool that this server cannot offer to the model, such as a search of the web. Some bodies may have such
    tools, and nothing comes of them."""

    model_config = ConfigDict(extra="ignore")

    type: str


def by_kind(*known: str, default: str | None = None) -> Discriminator:
    """Return a discriminator that tags a tool with its field `type`, or with "other" if it is not `known`.

    A tool without the field has the type `default`.
    """

    def kind(tool: Any) -> str:
        named = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
        named = default if named is None else named
        return named if named in known else "other"

    return Discriminator(kind)


def functions_of(tools: Mapping[str, Function]) -> tuple[Function, ...]:
    """Check functions, given by their paths in the body.

    Raises:
        ApiError: 422, two have the same name, a schema's type is not object, or it has an integer that is too long.
    """
    functions: dict[str, Function] = {}
    for name, function in tools.items():
        if function.name in functions:
            raise refused(name, f"there is another function named {function.name!r}")
        if function.parameters.get("type", "object") != "object":
            raise refused(name, "parameters: the arguments are an object; the schema's type must be 'object'")
        try:
            size(function.parameters)
        except InvalidGrammarError as error:
            raise refused(name, f"parameters: {error}") from None
        functions[function.name] = function
    return tuple(functions.values())


def tool_use_of(
    functions: Sequence[Function],
    choice: Word | None,
    *,
    names: Sequence[str] | None = None,
    parallel: bool = True,
) -> ToolUse | None:
    """Return the functions that the prompt describes, and those among them that may be called; None: none may be.

    Args:
        functions: all functions of the body.
        choice: whether functions may, must or must not be called; None: `auto`.
        names: names of the functions that may be called; None: all.
        parallel: several calls in one answer are allowed.

    Raises:
        ApiError: 422, a name is not that of a function, or a call is required and no function may be called.
    """
    for name in names or ():
        if all(name != function.name for function in functions):
            raise refused("tool_choice", f"there is no function {name!r} among the tools")
    if choice == "none":
        return None
    allowed = tuple(each for each in functions if names is None or each.name in names)
    if not allowed:
        if choice == "required":
            raise refused("tool_choice", "'required' needs tools; send some, or leave it out")
        return None
    return ToolUse(tuple(functions), allowed, required=choice == "required", parallel=parallel)


# ---------------------------------------------------------------------- calls in earlier messages


def _arguments_text(value: Any) -> Any:
    """Return arguments that came as an object as JSON text, those of null as an empty text, and any other value
    unchanged."""
    return to_json(value).decode() if isinstance(value, dict) else "" if value is None else value


#: The arguments of a call: the JSON text of an object. Some clients send the object itself.
Arguments = Annotated[
    str, BeforeValidator(_arguments_text, json_schema_input_type=str | dict[str, Any] | None)
]


class CalledFunction(Fields):
    """The function that a tool call names, and the arguments of the call."""

    name: Label
    arguments: Arguments = ""
    """JSON text, or the object; default: no arguments"""


class ToolCall(Fields):
    """A call in an assistant's message. A client sends it back as an earlier answer gave it."""

    id: str = Field(default="", max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """not read; streamed calls have it"""

    @classmethod
    def of(cls, call_id: str, name: str, arguments: str) -> ToolCall:
        """Return a call made of values that were validated already."""
        function = CalledFunction.model_construct(name=name, arguments=arguments)
        return cls.model_construct(id=call_id, function=function)

    def for_template(self) -> dict[str, Any]:
        return call_for_template(self.id, self.function.name, self.function.arguments)
