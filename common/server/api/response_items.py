"""Items of responses: messages, reasoning, function calls and their outputs; and the store that keeps them.

Items become messages of chat. Reasoning, an answer and calls become one message of the assistant, also if more of
them come after the calls:

```text
message (user)                                   {"role": "user", "content": "…"}
reasoning, message (assistant), function_call    {"role": "assistant", "reasoning_content": "…", "content": "…",
                                                  "tool_calls": […]}
function_call_output                             {"role": "tool", "tool_call_id": "…", "content": "…"}
```

The server keeps responses in memory, so that a client can refer to them: by `previous_response_id`, by an
`item_reference`, or by `GET /v1/responses/{id}`.

```text
POST /v1/responses                     ── completed ──> input, response     least recently used first out
POST … previous_response_id: resp_1    <──────────────  input + output of resp_1
POST … item_reference: msg_1_0         <──────────────  that item of resp_1, whose id is in the item's
```

A response belongs to the API key that it was requested with. Other keys do not find it.
"""

from __future__ import annotations

import hashlib
import threading
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import orjson
from pydantic import Discriminator, Field, Tag, TypeAdapter

from common.server.api.bodies import Fields, Label, OneText, Parts, by_type
from common.server.api.conversation import ChatMessage, message, text_of
from common.server.api.tools import Arguments, ToolCall
from common.server.errors import ApiError, refused, shorten

Status = Literal["in_progress", "completed", "incomplete"]


class ContentPart(Fields):
    """A part of a message's content, or of a function's output."""

    type: Literal["input_text", "output_text"]
    text: str
    logprobs: list[Any] | None = None
    """of an answer, if `include` asks for them; in the input, they change nothing"""


Content = Annotated[
    OneText | Parts[ContentPart],
    by_type("a string, or a list of parts of type input_text or output_text"),
]


class ItemFields(Fields):
    """The fields of all items. In the input they are labels."""

    places: ClassVar[tuple[str, ...]] = ("items",)

    id: Label | None = None
    status: Status | None = None


class MessageItem(ItemFields):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    phase: Literal["commentary", "final_answer"] | None = None
    """a label"""


class FunctionCall(ItemFields):
    """A call of a function by the model."""

    type: Literal["function_call"]
    call_id: Label
    name: Label
    namespace: Label | None = None
    """of the function, if it is in one"""
    arguments: Arguments
    """the JSON text of an object, or the object"""

    def as_call(self) -> ToolCall:
        return ToolCall.of(self.call_id, flat_name(self.namespace, self.name), self.arguments)


class FunctionCallOutput(ItemFields):
    """The result of an earlier `FunctionCall` with the same `call_id`."""

    type: Literal["function_call_output"]
    call_id: Label
    output: Content
    name: Label | None = None
    """a label"""
    namespace: Label | None = None
    """a label"""


class ThoughtPart(Fields):
    """A part of a reasoning item."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


ReasoningParts = Annotated[list[ThoughtPart], Field(max_length=256, fail_fast=True)]


class ReasoningItem(ItemFields):
    """Text that the model wrote before its answer. The template decides whether the model reads it again."""

    type: Literal["reasoning"]
    content: ReasoningParts | None = None
    summary: ReasoningParts | None = None
    """taken where there is no content"""
    encrypted_content: str | None = None
    """read where there is neither, if it comes from this server"""

    @property
    def text(self) -> str:
        parts = self.content or self.summary or ()
        return "\n".join(part.text for part in parts) or _unsealed(self.encrypted_content or "")


#: Before the text in an `encrypted_content` of this server's. Contents of other servers are left out.
SEAL = "infer:"


def sealed(text: str) -> str:
    """Return the `encrypted_content` of a thought: its text in base64, which is not encrypted."""
    return SEAL + b64encode(text.encode()).decode()


def _unsealed(content: str) -> str:
    """Return the text of a thought from what `sealed` returned; "" for any other text."""
    try:
        return b64decode(content.removeprefix(SEAL)).decode() if content.startswith(SEAL) else ""
    except ValueError:
        return ""


class ItemReference(ItemFields):
    """An item of a stored response's output, by its id."""

    type: Literal["item_reference"]
    id: Label


def _type_of(item: Any) -> Any:
    """Return the type of an item. An object without the field is a message, and no other value is an item."""
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_type_of),
]
Input = Annotated[
    OneText | Annotated[list[Item], Field(min_length=1, max_length=2048, fail_fast=True), Tag("list")],
    by_type("a string or a list of items"),
]

#: Validates and writes lists of items.
ITEMS = TypeAdapter[list[Any]](list[Item])


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name under which the model knows a function of a namespace: as in `mcp__files__read`, say."""
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


def messages_of(items: Sequence[Any]) -> list[ChatMessage]:
    """Return the messages that items stand for. Reasoning without text becomes none."""
    messages: list[ChatMessage] = []
    thoughts: dict[int, list[str]] = {}  # by the place of the message in `messages`
    for item in items:
        last = messages[-1] if messages and messages[-1].role == "assistant" else None
        open_ = last is not None and (last.tool_calls or not last.content)  # its answer goes on in this item
        match item:
            case ReasoningItem():
                if thought := item.text:
                    if not open_:
                        messages.append(message("assistant"))
                    thoughts.setdefault(len(messages) - 1, []).append(thought)
            case FunctionCall():
                if last is None:
                    messages.append(message("assistant"))
                messages[-1].tool_calls = calls = messages[-1].tool_calls or []
                calls.append(item.as_call())
            case FunctionCallOutput():
                messages.append(message("tool", item.output, tool_call_id=item.call_id))
            case MessageItem(role="assistant") if last and open_:
                content = text_of(last.content) + text_of(item.content) if last.content else item.content
                messages[-1] = message("assistant", content, tool_calls=last.tool_calls)
            case _:
                messages.append(message(item.role, item.content))
    for place, texts in thoughts.items():
        messages[place].reasoning_content = "\n".join(texts)
    return messages


def check_items(items: Sequence[Any], earlier: Sequence[Any]) -> None:
    """Raise ApiError (422) for an output without a call of the same `call_id` in an item before it, or in the
    `earlier` items of stored responses."""
    calls = {item.call_id for item in earlier if isinstance(item, FunctionCall)}
    for number, item in enumerate(items):
        if isinstance(item, FunctionCall):
            calls.add(item.call_id)
        if isinstance(item, FunctionCallOutput) and item.call_id not in calls:
            raise refused(
                f"input[{number}].call_id", f"no function_call before it has the call_id {item.call_id!r}"
            )


# ---------------------------------------------------------------------- stored responses

#: Most bytes of all stored responses together.
MAX_STORED_BYTES = 64 * 2**20


class Stored(NamedTuple):
    """A stored response."""

    owner: bytes  # digest of the API key that the response belongs to
    input: bytes  # JSON list of all items of its conversation, those of earlier responses included
    response: bytes  # as JSON

    @property
    def output(self) -> list[dict[str, Any]]:
        output: list[dict[str, Any]] = orjson.loads(self.response)["output"]
        return output

    def input_items(self, response_id: str) -> list[dict[str, Any]]:
        """Return the items of the conversation as OpenAI lists them: each with an id of its own, and contents as
        parts. An id that a client has sent twice stays that of the first item."""
        items: list[dict[str, Any]] = orjson.loads(self.input)
        ids: set[str] = set()
        for number, item in enumerate(items):
            if item.get("id") is None or item["id"] in ids:
                item["id"] = f"in_{response_id.removeprefix('resp_')}_{number}"
            ids.add(item["id"])
            if isinstance(item.get("content"), str):
                kind = "output_text" if item["role"] == "assistant" else "input_text"
                part = {"type": kind, "text": item["content"]}
                item["content"] = [part | ({"annotations": []} if kind == "output_text" else {})]
            if item["type"] in ("message", "function_call_output"):
                item.setdefault("status", "completed")
        return items

    @property
    def num_bytes(self) -> int:
        return len(self.input) + len(self.response)


class ResponseStore:
    """Keeps the most recently used responses: `limit` at most, of `max_bytes` together. Threads may share it."""

    def __init__(self, limit: int, max_bytes: int = MAX_STORED_BYTES) -> None:
        self.limit = limit
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._stored: OrderedDict[str, Stored] = OrderedDict()  # least recently used first
        self._num_bytes = 0

    def put(self, response_id: str, stored: Stored) -> None:
        """Store a response. Drops the least recently used ones beyond the bounds."""
        with self._lock:
            self._stored[response_id] = stored
            self._num_bytes += stored.num_bytes
            while len(self._stored) > self.limit or self._num_bytes > self._max_bytes:
                _, dropped = self._stored.popitem(last=False)
                self._num_bytes -= dropped.num_bytes

    def find(self, owner: bytes, response_id: str) -> Stored | None:
        """Return a response of this owner, and count it as used; None if there is none."""
        with self._lock:
            stored = self._stored.get(response_id)
            if stored is None or stored.owner != owner:
                return None
            self._stored.move_to_end(response_id)
            return stored

    def get(
        self, owner: bytes, response_id: str, param: str = "response_id", code: str = "response_not_found"
    ) -> Stored:
        """Return a response of this owner. Raises ApiError (404) if there is none."""
        stored = self.find(owner, response_id)
        if stored is None:
            raise self._not_found("response", response_id, param, code)
        return stored

    def remove(self, owner: bytes, response_id: str) -> None:
        """Forget a response of this owner. Raises ApiError (404) if there is none."""
        self.get(owner, response_id)
        with self._lock:
            removed = self._stored.pop(response_id, None)
            self._num_bytes -= 0 if removed is None else removed.num_bytes

    def conversation(self, owner: bytes, response_id: str) -> bytes:
        """Return the JSON list of a conversation's items, the response's output included. Raises ApiError (404) if
        this owner has no such response."""
        stored = self.get(owner, response_id, "previous_response_id", "previous_response_not_found")
        return orjson.dumps([*orjson.loads(stored.input), *stored.output])

    def item(self, owner: bytes, item_id: str) -> dict[str, Any]:
        """Return an item of a stored response's output. Raises ApiError (404) if this owner has none of this id."""
        stored = self.find(owner, response_of(item_id))
        for item in () if stored is None else stored.output:
            if item["id"] == item_id:
                return item
        raise self._not_found("item", item_id, "input", "item_not_found")

    def _not_found(self, kind: str, name: str, param: str, code: str) -> ApiError:
        kept = f"the latest {self.limit} responses are stored" if self.limit else "no responses are stored"
        message = f"{param}: there is no {kind} {shorten(name, 100)!r}; {kept} (--max-stored-responses)"
        return ApiError(404, message, param=param, code=code)


def response_of(item_id: str) -> str:
    """Return the id of the response whose output has an item of this id."""
    return f"resp_{item_id.partition('_')[2].rpartition('_')[0]}"


def owner_of(headers: Mapping[str, str]) -> bytes:
    """Return the digest of the API key in a request's headers, or of an empty key if there is none."""
    key = headers.get("authorization", "").partition(" ")[2] or headers.get("x-api-key", "")
    return hashlib.sha256(key.strip().encode("latin-1")).digest()
