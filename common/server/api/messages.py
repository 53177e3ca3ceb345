"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's API, translated to what chat does.

| Anthropic | as chat has it |
| --- | --- |
| `system` | a message of the system |
| blocks `text` | the message's content |
| blocks `thinking`; `redacted_thinking` | `reasoning_content`; left out |
| blocks `tool_use` | `tool_calls` |
| blocks `tool_result` | messages of the role `tool` |
| `tools`: `input_schema`; tools that a server runs | `parameters`; left out |
| `tool_choice`: `any`, `tool`; `disable_parallel_tool_use` | `required`, a function; `parallel_tool_calls` |
| `thinking` | `enable_thinking` in `chat_template_kwargs` |
| `output_config`: `effort`, `format`; `output_format` | `reasoning_effort`, `response_format` |

The stream of an answer:

```text
event: message_start               before the first token
event: ping                        again whenever nothing else was sent for a while
event: content_block_start         a block begins: thinking, text or tool_use
event: content_block_delta             thinking_delta, text_delta or input_json_delta: a piece of it
event: content_block_stop
event: message_delta               why the answer ends, and its usage
event: message_stop                or error: the answer failed
```
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NotRequired, get_args

import orjson
from fastapi import APIRouter
from pydantic import Field, Tag
from pydantic_core import from_json, to_json
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from common.constrained.grammar import Grammar
from common.request import StepOutput
from common.server.api import conversation as chat
from common.server.api.answer import Choice, ItemFormat
from common.server.api.bodies import Fields, Label, OneText, Parts, by_type, note
from common.server.api.conversation import EFFORT, ConversationRequest, ReasoningEffort
from common.server.api.parts import CallPart, Part, ReasoningPart
from common.server.api.stream import event
from common.server.api.tools import (
    FunctionFields,
    Named,
    NamedTool,
    OtherTool,
    ToolCall,
    by_kind,
)
from common.server.api.wanted import Shown, StopStrings
from common.server.errors import ErrorDetail, MessagesError, from_exception, refused
from common.server.routes import OF_BODIES, OF_TEXT, JsonRoute, answers, convert, event_stream, generate
from common.server.service import Served

router = APIRouter(route_class=JsonRoute)

#: How Claude Code's first block of `system` begins. Its text differs in each request, so no prefix would be cached.
BILLING = "x-anthropic-billing-header"

#: Chat's word for each `tool_choice` that names no tool.
CHOICES: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}

#: Tells Anthropic's library that a conversation cannot be continued by an earlier answer's id. It then sends the
#: whole conversation, without the field `thread`.
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}

# ---------------------------------------------------------------------- the body


class ThinkingBlock(Fields):
    """The model's thoughts in an earlier answer. The template decides whether the model reads them again."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""
    """not read"""


class RedactedThinkingBlock(Fields):
    """Thoughts that only their maker can read: left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Fields):
    """A call of a tool in an earlier answer."""

    type: Literal["tool_use"]
    id: Label
    name: Label
    input: dict[str, Any]


class ToolResultBlock(Fields):
    """The result of an earlier `tool_use`."""

    type: Literal["tool_result"]
    tool_use_id: Label
    content: chat.Content | None = None
    is_error: bool | None = None
    """a label: the content says what failed"""


Block = Annotated[
    chat.TextPart | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]

#: The types of blocks that the messages of each role may have.
BLOCKS = {
    "user": (chat.TextPart, ToolResultBlock),
    "assistant": (chat.TextPart, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "system": (chat.TextPart,),
}


class InputMessage(Fields):
    """A message of the conversation. An answer's `role` and `content` can be sent back as they are."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[OneText | Parts[Block], by_type("a string, or a list of blocks")]

    @property
    def blocks(self) -> Sequence[Any]:
        given: Any = self.content
        return [chat.TextPart(type="text", text=given)] if isinstance(given, str) else given

    def add_to(self, messages: list[chat.ChatMessage]) -> None:
        """Add the message to a conversation of chat: as one message or, with results of tools, as several."""
        blocks = self.blocks
        if self.role == "assistant":
            thoughts = "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
            calls = [
                ToolCall.of(block.id, block.name, to_json(block.input).decode())
                for block in blocks
                if isinstance(block, ToolUseBlock)
            ]
            text = _text([block for block in blocks if isinstance(block, chat.TextPart)])
            messages.append(
                chat.message("assistant", text, reasoning_content=thoughts or None, tool_calls=calls or None)
            )
            return
        texts: list[chat.TextPart] = []
        for block in blocks:
            if isinstance(block, chat.TextPart):
                texts.append(block)
                continue
            if texts:
                messages.append(chat.message(self.role, _text(texts)))
                texts = []
            messages.append(chat.message("tool", _text(block.content), tool_call_id=block.tool_use_id))
        if texts or not blocks:
            messages.append(chat.message(self.role, _text(texts)))


def _text(content: Any) -> Any:
    """Return text blocks, a text or None as the content of a message of chat, which for one block is its text."""
    one_block = isinstance(content, list) and len(content) == 1
    return content[0].text if one_block else content or ""


class CustomTool(FunctionFields):
    """A tool that the client runs."""

    places: ClassVar[tuple[str, ...]] = ("tools of Anthropic's messages",)

    type: Literal["custom"] | None = None
    parameters: dict[str, Any] = Field(alias="input_schema")
    """a JSON Schema of an object"""

    @property
    def function(self) -> CustomTool:
        """This object, which has the function's fields. In a chat request, an inner object of this name has these
        fields."""
        return self


Tool = Annotated[
    Annotated[CustomTool, Tag("custom")] | Annotated[OtherTool, Tag("other")],
    by_kind("custom", default="custom"),
]


class ToolChoice(Fields):
    """Whether the model calls tools."""

    type: Literal["auto", "any", "tool", "none"]
    """`auto`: the model decides; `any`: it calls tools; `tool`: it calls the tool `name`; `none`: it calls none,
    and is told of none"""
    name: Label | None = None
    disable_parallel_tool_use: bool | None = None
    """an answer has one call at most"""


class Thinking(Fields):
    """Whether the model thinks before it answers, if its template has the variable `enable_thinking`."""

    type: str
    """`disabled`, or any other word to think; default: the template's"""
    budget_tokens: int | None = None
    """not read: the model decides"""
    display: str | None = None
    """not read: thoughts are shown"""


class JsonFormat(Fields):
    """The answer is JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")
    """a JSON Schema"""


class OutputConfig(Fields):
    """How much the model reasons, and the form of its answer."""

    effort: ReasoningEffort | None = Field(default=None, description=EFFORT)
    format: JsonFormat | None = None


class MessagesRequest(ConversationRequest):
    """The body of `POST /v1/messages` and of `POST /v1/messages/count_tokens`."""

    places: ClassVar[tuple[str, ...]] = (
        *ConversationRequest.places,
        "responses, Anthropic's messages",
        "Anthropic's messages",
    )

    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=2048, fail_fast=True)]
    """each with a `role` and a `content`: a text, or blocks (text, thinking, tool_use, tool_result)"""
    system: chat.Content | None = None
    """a text, or blocks of text, before the messages"""
    max_tokens: int | None = Field(default=None, ge=0)
    """0: the prompt is computed, and cached, without an answer; default: as many as fit after the conversation"""
    stop_sequences: StopStrings | None = None
    """strings that end the answer, left out of its text"""
    tools: Annotated[list[Tool], Field(max_length=512, fail_fast=True)] | None = None  # type: ignore[assignment]  # chat has them in an envelope
    """tools that the client runs; those of other types are left out"""
    tool_choice: ToolChoice | None = None
    """whether the model calls tools; default: it decides"""
    thinking: Thinking | None = None
    """whether it thinks first; default: the template's"""
    output_config: OutputConfig | None = None
    """how much the model reasons, and the form of its answer"""
    output_format: JsonFormat | None = None
    """an older name of `output_config.format`; if both are sent, that one counts"""
    metadata: dict[str, Any] | None = None
    """a label: the log has its `user_id` as the user"""
    thread: Any = None
    """refused: send the whole conversation"""
    stream: bool | None = False
    """answer with an event stream"""

    def model_post_init(self, _: Any) -> None:
        """Set the fields of chat whose names or forms differ in Anthropic's API."""
        for number, tool in enumerate(self.tools or ()):
            if isinstance(tool, OtherTool):  # the log and a header name its type
                note(self._ignored, f"tools[{number}].", tool.type)
        self.tools = [tool for tool in self.tools or () if not isinstance(tool, OtherTool)]
        choice = self.tool_choice
        if choice is not None:
            self.parallel_tool_calls = not choice.disable_parallel_tool_use
            named = NamedTool.model_construct(
                type="function", function=Named.model_construct(name=choice.name or "")
            )
            self.tool_choice = CHOICES.get(choice.type, named)
        if self.thinking is not None:
            thinks = self.thinking.type != "disabled"
            self.chat_template_kwargs = {"enable_thinking": thinks} | (self.chat_template_kwargs or {})
        if self.stop_sequences:
            self.stop = [*self.stop_strings, *self.stop_sequences]
        user = (self.metadata or {}).get("user_id")
        if isinstance(user, str):
            self.user = user[:256]

    @cached_property
    def turns(self) -> list[chat.ChatMessage]:
        system: Any = self.system
        if isinstance(system, list):
            system = [block for block in system if not block.text.startswith(BILLING)]
        messages = [chat.message("system", _text(system))] if system else []
        for each in self.messages:
            each.add_to(messages)
        return messages

    @property
    def max_new_tokens(self) -> int | None:
        """The most tokens to sample for an answer. If the body asks for 0, one is sampled, and the answer leaves it
        out."""
        return None if self.max_tokens is None else max(1, self.max_tokens)

    @property
    def shown(self) -> Shown:
        return dataclasses.replace(super().shown, prompt_only=self.max_tokens == 0)

    @property
    def hints(self) -> dict[str, str | None]:
        return {"reasoning_effort": None if self.output_config is None else self.output_config.effort}

    @cached_property
    def named_grammar(self) -> tuple[str, Grammar] | None:
        if self.output_config is not None and self.output_config.format is not None:
            return "output_config.format.schema", Grammar.json_schema(self.output_config.format.schema_)
        if self.output_format is not None:
            return "output_format.schema", Grammar.json_schema(self.output_format.schema_)
        return super().named_grammar

    def _check_fields(self) -> None:
        super()._check_fields()
        if self.thread is not None:
            raise refused("thread", "no conversation is kept here; send all its messages", details=NO_THREADS)
        self.check_messages(())
        calls = set()
        for number, each in enumerate(self.messages):
            for place, block in enumerate(each.blocks):
                name = f"messages[{number}].content[{place}]"
                if not isinstance(block, BLOCKS[each.role]):
                    raise refused(
                        name, f"messages of the role {each.role} have no blocks of type {block.type}"
                    )
                if isinstance(block, ToolUseBlock):
                    calls.add(block.id)
                if isinstance(block, ToolResultBlock) and block.tool_use_id not in calls:
                    raise refused(
                        f"{name}.tool_use_id", f"no tool_use before it has the id {block.tool_use_id!r}"
                    )
        chat.refuse_long("messages", self.turns)


# ---------------------------------------------------------------------- the answer


class MessageUsage(TypedDict):
    input_tokens: Annotated[int, Field(description="of the prompt, without those found in memory")]
    cache_creation_input_tokens: Annotated[
        int, Field(description="0: what is computed may be kept at no charge")
    ]
    cache_read_input_tokens: Annotated[
        int, Field(description="of the prompt: found in memory and not computed")
    ]
    output_tokens: int


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class Ending(TypedDict):
    stop_reason: StopReason | None
    stop_sequence: Annotated[
        str | None, Field(description="with `stop_sequence`: the string that ended the answer")
    ]


class ContentBlock(TypedDict):
    """A block of an answer. `text`: an answer's text; `thinking`: thoughts; `tool_use`: a call."""

    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[Annotated[str, Field(description="the answer's id")]]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[dict[str, Any]]


class Message(Ending):
    """The JSON answer of `/v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    usage: MessageUsage


class BlockDelta(TypedDict):
    """A piece of a block."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    partial_json: NotRequired[str]


EventType = Literal[
    "message_start",
    "ping",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
    "error",
]


class MessageEvent(TypedDict):
    """The `data` of an event in the stream of a message. `type` is the event's name."""

    type: EventType
    message: NotRequired[Annotated[Message, Field(description="`message_start`")]]
    index: NotRequired[int]
    content_block: NotRequired[ContentBlock]
    delta: NotRequired[BlockDelta | Ending]
    usage: NotRequired[MessageUsage]
    error: NotRequired[ErrorDetail]


class TokenCount(TypedDict):
    """The JSON answer of `/v1/messages/count_tokens`."""

    input_tokens: int


class MessageEvents(ItemFormat):
    """The wire format of `/v1/messages`: a stream of Anthropic's named events, or one JSON object. The items are
    blocks."""

    ping = event({"type": "ping"}, "ping")

    def opening(self) -> bytes:
        prompt_tokens = len(self.answer.streams[0].request.prompt_token_ids)
        message = self._message(_usage(prompt_tokens, 0, 0), {"stop_reason": None, "stop_sequence": None})
        return event({"type": "message_start", "message": message}, "message_start") + self.ping

    def whole(self, said: Sequence[Sequence[StepOutput]]) -> Message:
        (choice,), (outputs,) = self.answer.choices, said
        for output in outputs:
            for _ in self.walk(choice, output):
                pass
        return self._message(_usage_of(choice), self._ending(choice))

    def begin(self, part: Part) -> Iterator[MessageEvent]:
        block: ContentBlock
        match part:
            case ReasoningPart():
                block = {"type": "thinking", "thinking": "", "signature": ""}
            case CallPart(_, call_id, name):
                block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
            case _:
                block = {"type": "text", "text": ""}
        self.items.append(block)
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def piece(self, text: str) -> MessageEvent:
        match self.items[-1]["type"]:
            case "thinking":
                return self._delta({"type": "thinking_delta", "thinking": text})
            case "tool_use":
                return self._delta({"type": "input_json_delta", "partial_json": text})
            case _:
                return self._delta({"type": "text_delta", "text": text})

    def end(self, text: str, complete: bool) -> Iterator[MessageEvent]:  # noqa: ARG002 - an input may be incomplete
        block = self.items[-1]
        if block["type"] == "tool_use":
            block["input"] = _input_of(text)
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":  # clients send back only thoughts that have a signature
            block["signature"] = self.answer.id
            yield self._delta({"type": "signature_delta", "signature": self.answer.id})
        yield {"type": "content_block_stop", "index": self._index}

    def end_answer(self, choice: Choice, output: StepOutput) -> Iterator[MessageEvent]:  # noqa: ARG002
        yield from self.end_item()  # type: ignore[misc]  # of this format
        yield {"type": "message_delta", "delta": self._ending(choice), "usage": _usage_of(choice)}
        yield {"type": "message_stop"}

    def fail(self, error: Exception) -> Iterator[MessageEvent]:
        yield {"type": "error", "error": from_exception(error).messages_body(None)["error"]}

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    def _delta(self, delta: BlockDelta) -> MessageEvent:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _message(self, usage: MessageUsage, ending: Ending) -> Message:
        return {
            "id": self.answer.id,
            "type": "message",
            "role": "assistant",
            "model": self.answer.model,
            "content": self.items,
            **ending,
            "usage": usage,
        }

    def _ending(self, choice: Choice) -> Ending:
        """Return why the answer ended. Call this after the choice's reader has read all text."""
        assert choice.latest is not None, "asked for with the last output"
        stopped_by = self.answer.stop_reason(choice).get("stop_reason")
        if choice.latest.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if choice.reader is not None and choice.reader.has_called:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(stopped_by, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
        return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage_of(choice: Choice) -> MessageUsage:
    usage = choice.usage()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return _usage(usage["prompt_tokens"], cached, usage["completion_tokens"])


def _usage(prompt_tokens: int, cached: int, output_tokens: int) -> MessageUsage:
    return {
        "input_tokens": prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output_tokens,
    }


def _input_of(text: str) -> orjson.Fragment:
    """Return the arguments of a call, encoded as an object: as far as they go if the answer broke off in them."""
    try:
        value = from_json(text or "{}", allow_partial=True)
    except ValueError:
        value = {}
    # `orjson` itself cannot write integers over 64 bits.
    return orjson.Fragment(to_json(value if isinstance(value, dict) else {}, inf_nan_mode="null"))


# ---------------------------------------------------------------------- the routes

_EVENTS = event_stream(MessageEvent, get_args(EventType))


@router.post("/v1/messages", **answers(Message, OF_TEXT, events=_EVENTS, strict=True, error=MessagesError))
async def create_message(request: Request, service: Served, wanted: MessagesRequest) -> Response:
    """Answer a conversation in Anthropic's form, as one message or, if asked to, as an event stream."""
    return await generate(request, service, wanted, MessageEvents, "msg_")


@router.post("/v1/messages/count_tokens", **answers(TokenCount, OF_BODIES, strict=True, error=MessagesError))
async def count_tokens(request: Request, service: Served, wanted: MessagesRequest) -> Response:
    """Return the number of tokens of the prompt that a body of `/v1/messages` becomes."""

    def count() -> TokenCount:
        return {"input_tokens": service.intake.count(wanted)}

    return await convert(request, service, count)
