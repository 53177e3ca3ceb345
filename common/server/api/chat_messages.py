"""Messages of a conversation, as chat has them. The items of responses become such messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, Tag

from common.server.api.bodies import BODY, refused
from common.server.api.fields import OLD_TOOLS, by_type
from common.server.api.tools import ToolCall


class TextPart(BaseModel):
    """A part of a message's content: a text."""

    model_config = BODY

    type: Literal["text"]
    text: str


#: An id or a name that a client chooses, and that changes no answer.
Label = Annotated[str, Field(max_length=256)]

Content = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[list[TextPart], Field(max_length=256, fail_fast=True), Tag("list")],
    by_type("a string, or a list of parts of type text"),
]


def text_of(content: Any) -> str:
    """Return the text of a message's content: a text, a list of parts (their texts are joined with nothing
    between), or None (an empty text)."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


class ChatMessage(BaseModel):
    """A message of a conversation. An answer's `message` can be sent back as it is."""

    model_config = BODY
    places: ClassVar[tuple[str, ...]] = ("messages",)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"] = Field(
        json_schema_extra={"enum": ["system", "developer", "user", "assistant", "tool"]}
    )
    content: Content | None = Field(
        default=None, description="a text, or a list of parts of type text; null is an empty text"
    )
    name: str | None = Field(default=None, description="a name, which some templates show")
    tool_calls: Annotated[list[ToolCall], Field(max_length=128, fail_fast=True)] | None = Field(
        default=None, description="an assistant's calls, as they were in its answer"
    )
    reasoning_content: str | None = Field(
        default=None,
        description="an assistant's thoughts, as they were in its answer; the template may leave them out",
    )
    reasoning: str | None = Field(default=None, description="another name of `reasoning_content`")
    provider_specific_fields: dict[str, Any] | None = Field(
        default=None, description="litellm's copy of an answer's fields, which it sends back; not read"
    )
    tool_call_id: str | None = Field(
        default=None, max_length=256, description="in a `tool` message: the id of the call that it answers"
    )

    def for_template(self, called: Mapping[str, str]) -> dict[str, Any]:
        """Return the message as a chat template reads it. `called` maps the ids of calls to function names."""
        name = self.name
        if self.role == "tool" and name is None:
            name = called.get(self.tool_call_id or "")
        given = {
            "name": name,
            "reasoning_content": self.reasoning_content or self.reasoning or None,
            "tool_call_id": self.tool_call_id,
            "tool_calls": [call.for_template() for call in self.tool_calls or ()] or None,
        }
        content: Any = self.content or ""
        if not isinstance(content, str):
            content = [{"type": "text", "text": part.text} for part in content]
        message: dict[str, Any] = {"role": self.role, "content": content}
        return message | {field: value for field, value in given.items() if value is not None}

    def check(self, name: str) -> None:
        """Refuse the role `function`, and fields that do not fit the message's role.

        `name` is the path of the message in the body, such as `messages[0]`.

        Raises:
            ApiError: 422.
        """
        if self.role == "function":
            raise refused(f"{name}.role", f"'function' is refused: {OLD_TOOLS}")
        if self.tool_calls and self.role != "assistant":
            raise refused(f"{name}.tool_calls", "only an assistant's message has calls")
        if (self.reasoning_content or self.reasoning) and self.role != "assistant":
            raise refused(f"{name}.reasoning_content", "only an assistant's message has thoughts")
        if self.tool_call_id is not None and self.role != "tool":
            raise refused(f"{name}.tool_call_id", "only a tool's message answers a call")


def message(role: str, content: Any = "", **fields: Any) -> ChatMessage:
    """Return a message made of values that were validated already."""
    return ChatMessage.model_construct(role=role, content=content, **fields)  # type: ignore[arg-type]


#: Most messages and calls in a conversation. Checking and rendering one takes about ten microseconds, during which
#: other threads wait for the interpreter.
MAX_TURNS = 2048
Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_TURNS, fail_fast=True)]


def refuse_long(field: str, messages: Sequence[ChatMessage]) -> None:
    """Raise ApiError (422) if the conversation in `field` has more than `MAX_TURNS` messages and calls."""
    turns = len(messages) + sum(len(message.tool_calls or ()) for message in messages)
    if turns > MAX_TURNS:
        raise refused(field, f"{turns} messages and calls; a conversation has at most {MAX_TURNS}")
