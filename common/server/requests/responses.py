"""The body of `POST /v1/responses`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, get_args

import orjson
from pydantic import BaseModel, Discriminator, Field, Tag
from pydantic.json_schema import SkipJsonSchema

from common.chat_template import ChatTemplate
from common.grammar import Grammar
from common.server.bodies import BODY, refused
from common.server.errors import shorten
from common.server.replies.response_shapes import Settings
from common.server.requests.chat import EFFORT, ReasoningEffort, TemplateOptions
from common.server.requests.generation import GenerationRequest, by_type
from common.server.requests.known_fields import (
    OpenAIInputFields,
    OpenAIPartFields,
    OpenAIReasoningFields,
    OpenAIResponsesFields,
    OpenAIStreamFields,
    OpenAITextFields,
)

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Label = Annotated[str, Field(max_length=256)]

Includable = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
LOGPROBS, ENCRYPTED = get_args(Includable)

#: Most bytes of the fields that a response repeats. A stream has them three times.
MAX_SETTINGS = 2**18


# ---------------------------------------------------------------------- items of the input


class Other(BaseModel):
    """An item or a part of another type, such as an image. `check` refuses it by its type's name."""

    type: str


def _form(known: Mapping[str, str], default: str | None = None) -> Callable[[Any], str | None]:
    """Return a function that returns the tag in `known` for the `type` of an item or a part.

    Another type's tag is "as another". Without a type, the tag is `default`.
    """

    def form(value: Any) -> str | None:
        kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)
        return known.get(kind, "as another") if isinstance(kind, str) else next(iter(known.values()))

    return form


class TextPart(OpenAIPartFields):
    """A part of a message's content, or of a function's output."""

    type: Literal["input_text", "output_text"]
    text: str
    logprobs: list[Any] | None = Field(
        default=None, description="as a response has them; they change nothing"
    )


Part = Annotated[
    Annotated[TextPart, Tag("as a text")] | SkipJsonSchema[Annotated[Other, Tag("as another")]],
    Discriminator(_form({"input_text": "as a text", "output_text": "as a text"})),
]
Content = Annotated[
    Annotated[str, Tag("as text")]
    | Annotated[list[Part], Field(max_length=256, fail_fast=True), Tag("as parts")],
    Discriminator(
        by_type({str: "as text", list: "as parts"}),
        custom_error_type="content_type",
        custom_error_message="Input should be a string, or a list of parts of type input_text or output_text",
    ),
]


class InputItem(OpenAIInputFields):
    """An item of the input. An item of a response's output can be sent back as it is."""

    id: Label | None = Field(default=None, description="a label")
    status: ItemStatus | None = Field(default=None, description="a label")

    def check(self, name: str) -> None:
        """Refuse values that a field's type cannot rule out. `name` is the item's place in the body.

        Raises:
            ApiError: 422.
        """

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Add the item to a conversation in the form that chat templates read."""
        raise NotImplementedError


class Message(InputItem):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    phase: Literal["commentary", "final_answer"] | None = Field(default=None, description="a label")

    def check(self, name: str) -> None:
        _check_parts(f"{name}.content", self.content)

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        messages.append({"role": self.role, "content": _joined(self.content)})


class FunctionCall(InputItem):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: Label
    name: Label
    arguments: str = Field(description="the JSON text of an object")

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": self.call_id, "type": "function", "function": function}
        messages[-1].setdefault("tool_calls", []).append(call)


class FunctionCallOutput(InputItem):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Label
    output: Content
    name: Label | None = Field(default=None, description="a label")

    def check(self, name: str) -> None:
        _check_parts(f"{name}.output", self.output)

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        messages.append({"role": "tool", "tool_call_id": self.call_id, "content": _joined(self.output)})


class ReasoningPart(BaseModel):
    """A part of a reasoning item."""

    model_config = BODY

    type: Literal["reasoning_text", "summary_text"]
    text: str


ReasoningParts = Annotated[list[ReasoningPart], Field(max_length=256, fail_fast=True)]


class Reasoning(InputItem):
    """Text that the model wrote before its answer. The template decides whether the model reads it again."""

    type: Literal["reasoning"]
    content: ReasoningParts | None = None
    summary: ReasoningParts | None = Field(default=None, description="taken where there is no content")

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        text = "\n".join(part.text for part in self.content or self.summary or ())
        messages.append({"role": "assistant", "content": "", "reasoning_content": text})


Item = Annotated[
    Annotated[Message, Tag("as a message")]
    | Annotated[FunctionCall, Tag("as a call")]
    | Annotated[FunctionCallOutput, Tag("as an output")]
    | Annotated[Reasoning, Tag("as reasoning")]
    | SkipJsonSchema[Annotated[Other, Tag("as another")]],
    Discriminator(
        _form(
            {
                "message": "as a message",
                "function_call": "as a call",
                "function_call_output": "as an output",
                "reasoning": "as reasoning",
            },
            default="message",
        )
    ),
]
Input = Annotated[
    Annotated[str, Tag("as text")]
    | Annotated[list[Item], Field(min_length=1, max_length=2048, fail_fast=True), Tag("as items")],
    Discriminator(
        by_type({str: "as text", list: "as items"}),
        custom_error_type="input_type",
        custom_error_message="Input should be a string or a list of items",
    ),
]


def _joined(content: Any) -> str:
    """Return a checked content's text; parts stand on lines of their own."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _check_parts(name: str, content: Any) -> None:
    """Refuse parts that are not text. `name` is the content's place in the body. Raises ApiError."""
    for number, part in enumerate(content):
        if isinstance(part, Other):
            kind = shorten(part.type, 40)
            raise refused(f"{name}[{number}].type", f"{kind!r} is refused: only parts of text are read")


# ---------------------------------------------------------------------- other objects of the body


class TextFormat(BaseModel):
    """The form of the answer."""

    model_config = BODY

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(default=None, max_length=64, description="with type `json_schema`, a label")
    description: str | None = Field(default=None, description="a label")
    schema_: dict[str, Any] | None = Field(
        default=None, alias="schema", description="with type `json_schema`: a JSON Schema"
    )
    strict: bool | None = Field(default=None, description="whatever it is, every answer follows the schema")


class TextOptions(OpenAITextFields):
    """The form of the answer."""

    format: TextFormat | None = None


class ReasoningOptions(OpenAIReasoningFields):
    """How the model reasons."""

    effort: ReasoningEffort | None = Field(default=None, description=EFFORT)


class ResponsesRequest(OpenAIResponsesFields, GenerationRequest, TemplateOptions):
    """The body of `POST /v1/responses`. null means the default, for all but `input`."""

    adds_special_tokens_by_default: ClassVar[bool] = False  # the template writes the special tokens

    input: Input = Field(
        description="a text, or a list of items: messages, reasoning, function calls and their outputs"
    )
    instructions: str | None = Field(default=None, description="a system message before the input")
    max_output_tokens: int | None = Field(
        default=None, ge=1, description="default: as many as fit behind the conversation"
    )
    text: TextOptions | None = Field(default=None, description="the form of the answer")
    reasoning: ReasoningOptions | None = Field(default=None, description="how the model reasons")
    include: Annotated[list[Includable], Field(max_length=16)] | None = Field(
        default=None, description=f"`{LOGPROBS}`; `{ENCRYPTED}` is accepted, but reasoning is sent as text"
    )
    top_logprobs: int | None = Field(
        default=None, ge=0, le=20, description=f"likeliest tokens beside each; with `{LOGPROBS}` in `include`"
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        default="disabled",
        description="`auto`: of a conversation too long, the last tokens that fit are taken",
    )
    stream: bool | None = Field(default=False, description="answer with an event stream")
    stream_options: OpenAIStreamFields | None = None  # type: ignore[assignment]  # the last event has the usage

    @property
    def num_prompts(self) -> int:
        return 1

    def prompts(self, template: ChatTemplate | None) -> list[str]:
        return [self.render(self.messages, template)]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation as chat templates read it."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        given: Any = self.input
        if isinstance(given, str):
            messages.append({"role": "user", "content": given})
        else:
            for item in given:
                item.add_to(messages)
        return messages

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def reported_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    @property
    def kept_prompt_tokens(self) -> int | None:
        return -1 if self.truncation == "auto" else super().kept_prompt_tokens

    @property
    def effort(self) -> ReasoningEffort | None:
        return None if self.reasoning is None else self.reasoning.effort

    def field_of(self, param: str) -> str:
        names = {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens"}
        return ({"reasoning_effort": "reasoning.effort"} | names).get(param, param)

    @cached_property
    def named_grammar(self) -> tuple[str, Grammar] | None:
        wanted = self._format
        if wanted.schema_ is not None:
            return "text.format.schema", Grammar.json_schema(wanted.schema_)
        if wanted.type == "json_object":
            return "text.format", Grammar.json_object()
        return super().named_grammar

    @property
    def _format(self) -> TextFormat:
        wanted = None if self.text is None else self.text.format
        return TextFormat(type="text") if wanted is None else wanted

    def settings(self, temperature: float, top_p: float) -> Settings:
        """Return the fields of the request that a response repeats.

        Args:
            temperature: the temperature in effect.
            top_p: likewise.
        """
        reasoning = self.reasoning or ReasoningOptions()
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": None,
            "metadata": self.metadata or {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": temperature,
            "text": {"format": self._format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": top_p,
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }

    # ------------------------------------------------------------------ checks

    def _check_fields(self) -> None:
        super()._check_fields()
        self.check_messages(())
        given: Any = self.input
        if not isinstance(given, str):
            _check_items(given)
        if self.top_logprobs and self.reported_logprobs is None:
            raise refused("top_logprobs", f'only with "{LOGPROBS}" in include')
        settings = len(orjson.dumps(self.settings(1.0, 1.0)))
        if settings > MAX_SETTINGS:
            raise refused(
                "instructions",
                f"with tools and the like {settings} bytes, which a stream repeats three times; at most "
                f"{MAX_SETTINGS} are taken. Send long texts in input",
            )

    def _check_form(self) -> None:
        super()._check_form()
        wanted = self._format
        if (wanted.type == "json_schema") is not (wanted.schema_ is not None):
            raise refused("text.format", "schema and type 'json_schema' go together; send both or neither")
        if wanted.type != "text" and self.structured_outputs is not None:
            raise refused("structured_outputs", "text.format says already what answers look like; send one")


def _check_items(items: Sequence[Any]) -> None:
    """Refuse items that are not read, and outputs of calls that the input does not have.

    Raises:
        ApiError: 422.
    """
    calls = set()
    for number, item in enumerate(items):
        name = f"input[{number}]"
        if isinstance(item, Other):
            kind = shorten(item.type, 40)
            raise refused(
                f"{name}.type",
                f"{kind!r} is refused: items are messages, reasoning, function_call and function_call_output",
            )
        item.check(name)
        if isinstance(item, FunctionCall):
            calls.add(item.call_id)
        if isinstance(item, FunctionCallOutput) and item.call_id not in calls:
            raise refused(f"{name}.call_id", f"no function_call before it has the call_id {item.call_id!r}")
