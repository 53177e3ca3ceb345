"""Items of the input of `POST /v1/responses`: messages, reasoning, function calls and their outputs.

Items become messages of chat. Reasoning, an answer and calls, in this order, become one message of the assistant:

```text
message (user)                                   {"role": "user", "content": "…"}
reasoning, message (assistant), function_call    {"role": "assistant", "reasoning_content": "…", "content": "…",
                                                  "tool_calls": […]}
function_call_output                             {"role": "tool", "tool_call_id": "…", "content": "…"}
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, TypeAdapter

from common.server.api.bodies import BODY, refused
from common.server.api.chat_messages import ChatMessage
from common.server.api.fields import by_type
from common.server.api.tools import CalledFunction, ToolCall

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Label = Annotated[str, Field(max_length=256)]


class TextPart(BaseModel):
    """A part of a message's content, or of a function's output."""

    model_config = BODY

    type: Literal["input_text", "output_text"]
    text: str
    logprobs: list[Any] | None = Field(
        default=None, description="as a response has them; they change nothing"
    )


Content = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[list[TextPart], Field(max_length=256, fail_fast=True), Tag("list")],
    by_type("a string, or a list of parts of type input_text or output_text"),
]


class InputItem(BaseModel):
    """An item of the input. An item of a response's output can be sent back as it is."""

    model_config = BODY
    places: ClassVar[tuple[str, ...]] = ("items",)

    id: Label | None = Field(default=None, description="a label")
    status: ItemStatus | None = Field(default=None, description="a label")


class Message(InputItem):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    phase: Literal["commentary", "final_answer"] | None = Field(default=None, description="a label")


class FunctionCall(InputItem):
    """A call of a function by the model, in an earlier answer."""

    type: Literal["function_call"]
    call_id: Label
    name: Label
    namespace: Label | None = Field(default=None, description="as the answer had it")
    arguments: str = Field(description="the JSON text of an object")

    def as_call(self) -> ToolCall:
        name = flat_name(self.namespace, self.name)
        function = CalledFunction.model_construct(name=name, arguments=self.arguments)
        return ToolCall.model_construct(id=self.call_id, function=function)


class FunctionCallOutput(InputItem):
    """The result of an earlier `FunctionCall` with the same `call_id`."""

    type: Literal["function_call_output"]
    call_id: Label
    output: Content
    name: Label | None = Field(default=None, description="a label")
    namespace: Label | None = Field(default=None, description="a label")


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

    @property
    def thought(self) -> str:
        """The text of all parts, one after the other on lines of their own."""
        return "\n".join(part.text for part in self.content or self.summary or ())


class ItemReference(InputItem):
    """An item of an earlier response's output, by its id."""

    type: Literal["item_reference"]
    id: Label


def _type_of(item: Any) -> Any:
    """Return the type of an item. An object without the field is a message, and no other value is an item."""
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")


Item = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[Reasoning, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_type_of),
]
Input = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[list[Item], Field(min_length=1, max_length=2048, fail_fast=True), Tag("list")],
    by_type("a string or a list of items"),
]


#: Validates and writes lists of items.
ITEMS = TypeAdapter[list[Any]](list[Item])


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name under which the model knows a function of a namespace: as in `mcp__files__read`, say."""
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


def message(role: str, content: Any = "", **fields: Any) -> ChatMessage:
    """Return a message made of values that were validated already."""
    return ChatMessage.model_construct(role=role, content=content, **fields)  # type: ignore[arg-type]


def messages_of(items: Sequence[Any]) -> list[ChatMessage]:
    """Return the messages that items stand for. Reasoning, an answer and calls, in this order, become one message;
    reasoning without text becomes none."""
    messages: list[ChatMessage] = []
    thoughts: dict[int, list[str]] = {}  # by the place of the message in `messages`
    for item in items:
        last = messages[-1] if messages else None
        only_reasons = (
            last is not None and len(messages) - 1 in thoughts and not (last.content or last.tool_calls)
        )
        match item:
            case Reasoning():
                if thought := item.thought:
                    if not only_reasons:
                        messages.append(message("assistant"))
                    thoughts.setdefault(len(messages) - 1, []).append(thought)
            case FunctionCall():
                if last is None or last.role != "assistant":
                    messages.append(message("assistant"))
                messages[-1].tool_calls = calls = messages[-1].tool_calls or []
                calls.append(item.as_call())
            case FunctionCallOutput():
                messages.append(message("tool", item.output, tool_call_id=item.call_id))
            case Message(role="assistant") if only_reasons:
                messages[-1] = message("assistant", item.content)
            case _:
                messages.append(message(item.role, item.content))
    for place, texts in thoughts.items():
        messages[place].reasoning_content = "\n".join(texts)
    return messages


def check_items(items: Sequence[Any], earlier: Sequence[Any]) -> None:
    """Refuse outputs without a call of the same `call_id` before them: in `items`, or in the `earlier` items of
    stored responses.

    Raises:
        ApiError: 422.
    """
    calls = {item.call_id for item in earlier if isinstance(item, FunctionCall)}
    for number, item in enumerate(items):
        if isinstance(item, FunctionCall):
            calls.add(item.call_id)
        if isinstance(item, FunctionCallOutput) and item.call_id not in calls:
            raise refused(
                f"input[{number}].call_id", f"no function_call before it has the call_id {item.call_id!r}"
            )
