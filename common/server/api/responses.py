"""`POST /v1/responses`: OpenAI's API of items, answered with one response or with a stream of named events.

The items of the input become messages of chat (`response_items`). The answer is items, too. Its stream:

```text
event: response.created                   before the first token; response.in_progress comes next
event: response.output_item.added         an item of the output begins: reasoning, a message, a call
event: response.content_part.added            its only part (a call has none)
event: response.output_text.delta                 a piece of its text
event: response.output_text.done                  its whole text
event: response.content_part.done
event: response.output_item.done
event: response.completed                 or response.incomplete: the whole response, with its usage
```

A reasoning item grows by `response.reasoning_text.delta`, and a call by `response.function_call_arguments.delta`.
An answer that fails ends with `error` and `response.failed`. Each `data` has the event's name as `type` and its
number as `sequence_number`.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NotRequired, get_args

import orjson
from fastapi import APIRouter, Query
from pydantic import Field, PrivateAttr, Tag
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from common.constrained.grammar import Grammar
from common.constrained.tool_calls import Function
from common.request import StepOutput
from common.server.api.answer import Answer, Choice, ItemFormat
from common.server.api.bodies import MAX_BODY_BYTES, Fields, note, too_large
from common.server.api.conversation import (
    EFFORT,
    VERBOSITY,
    ChatMessage,
    ConversationRequest,
    ReasoningEffort,
    message,
    refuse_long,
)
from common.server.api.logprobs import ChatTokenLogprobs, chat_logprobs
from common.server.api.parts import CallPart, Part, ReasoningPart, TextPart
from common.server.api.response_items import (
    ITEMS,
    ContentPart,
    FunctionCall,
    Input,
    ItemReference,
    MessageItem,
    ReasoningItem,
    ResponseStore,
    Stored,
    ThoughtPart,
    check_items,
    flat_name,
    messages_of,
    owner_of,
    sealed,
)
from common.server.api.stream import event
from common.server.api.tools import (
    BY_CHOICE,
    CHOICE,
    FunctionFields,
    FunctionName,
    OtherTool,
    Word,
    by_kind,
    functions_of,
)
from common.server.api.wanted import NewTokens, Whole, naming
from common.server.errors import ApiError, ErrorDetail, from_exception, json_response, refused, shorten
from common.server.routes import OF_BODIES, OF_TEXT, JsonRoute, answers, convert, event_stream, generate
from common.server.service import Served

router = APIRouter(route_class=JsonRoute)

Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
LOGPROBS, ENCRYPTED, *WITHOUT_EFFECT = get_args(Includable)

#: `sequence_number` of the first event that `lost` returns. Every event that was sent has a lower number.
AFTER_ALL = 2**31


# ---------------------------------------------------------------------- tools


class FunctionTool(FunctionFields):
    """A tool in the body of responses: a function that the model may call."""

    places: ClassVar[tuple[str, ...]] = ("tools of responses",)

    type: Literal["function"]
    strict: bool | None = True
    """whether calls follow the schema also where `tool_choice` does not require one"""

    def as_function(self) -> Function:
        return dataclasses.replace(super().as_function(), strict=self.strict is not False)

    def as_given(self) -> dict[str, Any]:
        """Return the tool as a response repeats it."""
        given = self.model_dump(include={"type", "name", "description", "parameters"})
        return given | {"strict": self.strict is not False}


class Namespace(Fields):
    """A tool in the body of responses: functions under a common name, such as those of one MCP server."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    """a label"""
    tools: Annotated[
        list[
            Annotated[
                Annotated[FunctionTool, Tag("function")] | Annotated[OtherTool, Tag("other")],
                by_kind("function"),
            ]
        ],
        Field(max_length=128, fail_fast=True),
    ]

    def as_given(self) -> dict[str, Any]:
        """Return the tool as a response repeats it."""
        tools = [tool.as_given() for tool in self.tools if isinstance(tool, FunctionTool)]
        return {"type": "namespace", "name": self.name, "description": self.description, "tools": tools}


Tool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[Namespace, Tag("namespace")]
    | Annotated[OtherTool, Tag("other")],
    by_kind("function", "namespace"),
]


class NamedTool(Fields):
    """A tool that `tool_choice` names."""

    type: Literal["function"]
    name: FunctionName
    namespace: str | None = Field(default=None, max_length=128)
    """of the function"""

    @property
    def called(self) -> str:
        return flat_name(self.namespace, self.name)


class AllowedTools(Fields):
    """The tools of the body that may be called, and whether a call is required (`mode`). The model is told of all
    tools of the body."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[
            Annotated[
                Annotated[NamedTool, Tag("function")] | Annotated[OtherTool, Tag("other")],
                by_kind("function"),
            ]
        ],
        Field(min_length=1, max_length=128, fail_fast=True),
    ]

    @property
    def allowed_tools(self) -> AllowedTools:
        """This object without tools of other types. In a chat request, an inner object of this name has the fields
        `mode` and `tools`."""
        functions = [tool for tool in self.tools if isinstance(tool, NamedTool)]
        return self.model_copy(update={"tools": functions})


ToolChoice = Annotated[
    Annotated[Word, Tag("str")]
    | Annotated[NamedTool, Tag("function")]
    | Annotated[AllowedTools, Tag("allowed_tools")],
    BY_CHOICE,
]


# ---------------------------------------------------------------------- the body


class TextFormat(Fields):
    """The form of the answer: any text, a JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    """with type `json_schema`, a label"""
    description: str | None = None
    """a label"""
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """with type `json_schema`: a JSON Schema"""
    strict: bool | None = None
    """whatever it is, every answer follows the schema"""


class TextOptions(Fields):
    """The field `text` of the body, with the form of the answer."""

    format: TextFormat | None = None
    verbosity: str | None = Field(default=None, description=VERBOSITY)


class ReasoningOptions(Fields):
    """The field `reasoning` of the body: how the model reasons."""

    places: ClassVar[tuple[str, ...]] = ("reasoning",)

    effort: ReasoningEffort | None = Field(default=None, description=EFFORT)


class ResponsesRequest(ConversationRequest):
    """The body of `POST /v1/responses`. null means the default, for all but `input`."""

    places: ClassVar[tuple[str, ...]] = (
        *ConversationRequest.places,
        "responses, Anthropic's messages",
        "responses",
    )

    input: Input
    """a text, or a list of items: messages, reasoning, function calls and their outputs"""
    instructions: str | None = None
    """a system message before the input"""
    max_output_tokens: NewTokens = None
    """at most as many as fit after the conversation, which is the default"""
    text: TextOptions | None = None
    """the form of the answer"""
    reasoning: ReasoningOptions | None = None
    """how the model reasons"""
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None  # type: ignore[assignment]  # chat has them in an envelope
    """functions that the model may call, each with a name and a JSON Schema, and namespaces of such functions;
    tools of other types are skipped"""
    tool_choice: ToolChoice | None = Field(default=None, description=CHOICE)
    include: Annotated[list[Includable], Field(max_length=16)] | None = Field(
        default=None,
        description=f"`{LOGPROBS}`; `{ENCRYPTED}`: the text of reasoning, in base64, for clients that send "
        "no other field of it back; OpenAI's other values are ignored",
    )
    top_logprobs: Whole | None = Field(
        default=None, ge=0, le=20, description=f"likeliest tokens beside each; with `{LOGPROBS}` in `include`"
    )
    truncation: Literal["auto", "disabled"] | None = "disabled"
    """`auto`: a conversation that is too long is cut, and its last tokens stay"""
    stream: bool | None = False
    """answer with an event stream"""
    previous_response_id: str | None = None
    """a stored response, whose conversation the input continues"""
    store: bool | None = True
    """the response is stored, unless the server stores none"""

    # The stored items that the input continues, and what stores the response.
    _earlier: list[Any] = PrivateAttr(default_factory=list)
    _keep: Callable[[ResponseObject], None] | None = PrivateAttr(default=None)

    def complete(self, request: Request) -> None:
        """Fetch the stored items that the request refers to, and note where its response is to be stored.

        Raises:
            ApiError: 404, this owner has no such response or item; 413, the whole conversation is too large.
        """
        store: ResponseStore = request.app.state.server.stored
        owner = owner_of(request.headers)
        if self.previous_response_id is not None:
            self._earlier = ITEMS.validate_json(store.conversation(owner, self.previous_response_id))
        given: Any = self.input
        if not isinstance(given, str):
            self.input = [
                ITEMS.validate_python([store.item(owner, item.id)])[0]
                if isinstance(item, ItemReference)
                else item
                for item in given
            ]
        if store.limit == 0 or self.store is False:
            return
        conversation = ITEMS.dump_json([*self._earlier, *self._items], exclude_none=True)
        if len(conversation) > MAX_BODY_BYTES:
            raise too_large("the conversation with its stored items")
        self._keep = lambda response: store.put(
            response["id"], Stored(owner, conversation, orjson.dumps(response))
        )

    def keep(self, response: ResponseObject) -> None:
        """Store the response to this request, if the request and the server want that."""
        if self._keep is not None:
            self._keep(response)

    @property
    def _items(self) -> list[Any]:
        """The items of the input."""
        given: Any = self.input
        return [MessageItem(role="user", content=given)] if isinstance(given, str) else given

    @cached_property
    def turns(self) -> list[ChatMessage]:
        messages = [message("system", self.instructions)] if self.instructions else []
        return messages + messages_of([*self._earlier, *self._items])

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
    def hints(self) -> dict[str, str | None]:
        reasoning, text = self.reasoning or ReasoningOptions(), self.text or TextOptions()
        return {"reasoning_effort": reasoning.effort, "verbosity": text.verbosity}

    def field_of(self, param: str) -> str:
        names = {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens"}
        return names.get(param, param)

    @cached_property
    def named_grammar(self) -> tuple[str, Grammar] | None:
        wanted = self._format
        if wanted.schema_ is not None:
            path = "text.format.schema"
            with naming(path):
                return path, Grammar.json_schema(wanted.schema_)
        if wanted.type == "json_object":
            return "text.format", Grammar.json_object()
        return super().named_grammar

    @property
    def _format(self) -> TextFormat:
        return (self.text or TextOptions()).format or TextFormat(type="text")

    @cached_property
    def told_functions(self) -> tuple[Function, ...]:
        return functions_of(
            {
                path: dataclasses.replace(function.as_function(), name=flat_name(namespace, function.name))
                for path, namespace, function in self._functions
            }
        )

    @property
    def _functions(self) -> Iterator[tuple[str, str | None, FunctionTool]]:
        """Each function in the field `tools`: its path in the body, its namespace, and the function."""
        tools: Any = self.tools or ()
        for number, tool in enumerate(tools):
            path, namespace, inner = f"tools[{number}]", None, {"": tool}
            if isinstance(tool, Namespace):
                namespace = tool.name
                inner = {f".tools[{place}]": each for place, each in enumerate(tool.tools)}
            for place, each in inner.items():
                if isinstance(each, FunctionTool):
                    yield path + place, namespace, each
                else:  # the log and a header name its type
                    note(self._ignored, f"{path}{place}.", each.type)

    @cached_property
    def called(self) -> Mapping[str, Mapping[str, str]]:
        """The fields of a call that name a function, by the name under which the model knows the function."""
        return {
            flat_name(namespace, function.name): {"name": function.name}
            | ({} if namespace is None else {"namespace": namespace})
            for _, namespace, function in self._functions
        }

    def known_as(self, name: str) -> Sequence[str]:
        if name in self.called:
            return [name]
        return [flat for flat, called in self.called.items() if called["name"] == name] or [name]

    def settings(self, temperature: float, top_p: float) -> dict[str, Any]:
        """Return the fields that a response repeats, with the `temperature` and `top_p` in effect."""
        reasoning = self.reasoning or ReasoningOptions()
        choice: Any = self.tool_choice or "auto"
        tools: Any = self.tools or ()
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": None,
            "metadata": {
                name: value if isinstance(value, str) else json.dumps(value)
                for name, value in (self.metadata or {}).items()
            },
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": self._keep is not None,
            "temperature": temperature,
            "text": _written({"format": self._format.model_dump(by_alias=True, exclude_none=True)}),
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
            "tools": _written([tool.as_given() for tool in tools if not isinstance(tool, OtherTool)]),
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
            check_items(given, self._earlier)
        if not self.turns:
            raise refused("input", "no item in it is a message, a call, an output or reasoning with a text")
        refuse_long("input", self.turns)
        for number, name in enumerate(self.include or ()):
            if name in WITHOUT_EFFECT:
                note(self._ignored, f"include[{number}].", name)
        if self.top_logprobs and self.reported_logprobs is None:
            raise refused("top_logprobs", f'only with "{LOGPROBS}" in include')

    def _check_form(self) -> None:
        super()._check_form()
        wanted = self._format
        if (wanted.type == "json_schema") is not (wanted.schema_ is not None):
            raise refused("text.format", "schema and type 'json_schema' go together; send both or neither")
        for name in ("response_format", "structured_outputs"):
            if wanted.type != "text" and getattr(self, name) is not None:
                raise refused(name, "text.format says already what answers look like; send one")


def _written(schemas: Any) -> Any:
    """Encode fields that hold JSON Schemas as JSON, which `orjson` copies: it cannot write integers over 64 bits
    itself."""
    return orjson.Fragment(to_json(schemas, inf_nan_mode="null"))


# ---------------------------------------------------------------------- the answer's objects

#: An item of a response's output.
OutputItem = Annotated[MessageItem | ReasoningItem | FunctionCall, Field(discriminator="type")]


class ResponseFailure(TypedDict):
    code: Literal["server_error"]
    message: str


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class InputTokensDetails(TypedDict):
    cached_tokens: Annotated[
        int, Field(description="found in memory and not computed; 0 in phases that share nothing")
    ]
    cache_write_tokens: Annotated[int, Field(description="0: what is computed may be kept at no charge")]


class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(TypedDict):
    """The JSON answer of `/v1/responses`. Many of its fields repeat fields of the request. Unimplemented ones have
    a neutral value."""

    id: str
    object: Literal["response"]
    created_at: Annotated[int, Field(description="seconds since 1970")]
    completed_at: int | None
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponseUsage | None
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Annotated[bool, Field(description="whether the response is stored once it is complete")]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None


class DeletedResponse(TypedDict):
    """The JSON answer of `DELETE /v1/responses/{id}`."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(TypedDict):
    """The JSON answer of `/v1/responses/{id}/input_items`."""

    object: Literal["list"]
    data: Annotated[list[dict[str, Any]], Field(description="the latest first, unless `order` is `asc`")]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(TypedDict):
    """The answer of `/v1/responses/input_tokens`."""

    object: Literal["response.input_tokens"]
    input_tokens: int


EventType = Literal[
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
    "response.completed",
    "response.incomplete",
    "error",
    "response.failed",
]


class ResponseEvent(TypedDict):
    """The `data` of an event in the stream of a response. `type` is the event's name."""

    type: EventType
    sequence_number: Annotated[int, Field(description="counts the stream's events from 0")]
    response: NotRequired[Annotated[ResponseObject, Field(description="first and last events")]]
    output_index: NotRequired[int]
    item: NotRequired[OutputItem]
    item_id: NotRequired[str]
    content_index: NotRequired[Literal[0]]
    part: NotRequired[ContentPart | ThoughtPart]
    delta: NotRequired[str]
    text: NotRequired[str]
    arguments: NotRequired[str]
    logprobs: NotRequired[list[ChatTokenLogprobs]]
    code: NotRequired[Annotated[str, Field(description="`error`")]]
    message: NotRequired[str]
    param: NotRequired[str | None]
    error: NotRequired[Annotated[ErrorDetail, Field(description="`error`: the same, as in every error")]]


# ---------------------------------------------------------------------- the answer

#: By an item's type: the prefix of its id, and the middle of the names of its `delta` and `done` events.
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
GROWS_BY = {
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
}


class ResponseEvents(ItemFormat):
    """The wire format of `/v1/responses`: a stream of OpenAI's named events, or one JSON object."""

    def __init__(self, answer: Answer, wanted: ResponsesRequest) -> None:
        super().__init__(answer, wanted)
        self._wanted = wanted
        params = answer.streams[0].request.params
        self._settings = wanted.settings(params.temperature, params.top_p)
        self._logprobs: list[ChatTokenLogprobs] = []  # of tokens whose text has not come yet
        self._sent: defaultdict[int, list[ChatTokenLogprobs]] = defaultdict(list)  # of each item's pieces
        self._num_events = 0
        self._whole: ResponseObject | None = None  # once the answer has ended

    def opening(self) -> bytes:
        created = self._event("response.created", response=self._response("in_progress"))
        in_progress = self._event("response.in_progress", response=self._response("in_progress"))
        return event(created, created["type"]) + event(in_progress, in_progress["type"])

    def events(self, choice: Choice, output: StepOutput) -> bytes:
        events = super().events(choice, output)
        if self._whole is not None:
            self._wanted.keep(self._whole)
        return events

    def lost(self, error: ApiError) -> bytes:
        written, self._num_events = self._num_events, AFTER_ALL
        end = super().lost(error)
        self._num_events = written
        return end

    def whole(self, said: Sequence[Sequence[StepOutput]]) -> ResponseObject:
        (choice,), (outputs,) = self.answer.choices, said
        events: list[Any] = [each for output in outputs for each in self.walk(choice, output)]
        response: ResponseObject = events[-1]["response"]
        self._wanted.keep(response)
        return response

    # ------------------------------------------------------------------ events

    def _event(self, name: str, **fields: Any) -> ResponseEvent:
        number, self._num_events = self._num_events, self._num_events + 1
        return {"type": name, "sequence_number": number, **fields}  # type: ignore[typeddict-item]

    def walk(self, choice: Choice, output: StepOutput) -> Iterator[Mapping[str, Any]]:
        logprobs = chat_logprobs(self.answer, choice, [output])
        self._logprobs += [] if logprobs is None else logprobs["content"]
        yield from super().walk(choice, output)

    def begin(self, part: Part) -> Iterator[ResponseEvent]:
        fields: dict[str, Any]
        match part:
            case ReasoningPart():
                kind, fields = "reasoning", {"summary": [], "content": [], "encrypted_content": None}
            case CallPart(_, call_id, name):
                kind, fields = (
                    "function_call",
                    {"call_id": call_id, **self._wanted.called[name], "arguments": ""},
                )
            case _:
                kind, fields = "message", {"role": "assistant", "content": []}
        number = f"{self.answer.id.removeprefix('resp_')}_{len(self.items)}"
        item = {"id": f"{PREFIXES[kind]}_{number}", "type": kind, "status": "in_progress", **fields}
        self.items.append(item)
        yield self._event("response.output_item.added", output_index=len(self.items) - 1, item=item)
        if "content" in fields:
            yield self._event("response.content_part.added", **self._place, part=_part(kind, ""))

    def piece(self, text: str) -> ResponseEvent:
        kind = self.items[-1]["type"]
        logprobs, self._logprobs = self._logprobs, []
        more = {"logprobs": logprobs} if kind == "message" else {}
        if kind == "message":
            self._sent[len(self.items) - 1] += logprobs
        return self._event(f"response.{GROWS_BY[kind]}.delta", **self._place, delta=text, **more)

    def end(self, text: str, complete: bool) -> Iterator[ResponseEvent]:
        item = self.items[-1]
        kind = item["type"]
        done = f"response.{GROWS_BY[kind]}.done"
        if kind == "function_call":
            item["arguments"] = text
            yield self._event(done, **self._place, arguments=text)
        else:
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            yield self._event(done, **self._place, text=text, **more)
            item["content"] = [_part(kind, text)]
            if kind == "reasoning" and ENCRYPTED in (self._wanted.include or ()):
                item["encrypted_content"] = sealed(text)
            yield self._event("response.content_part.done", **self._place, part=item["content"][0])
        item["status"] = "completed" if complete else "incomplete"
        yield self._event("response.output_item.done", output_index=len(self.items) - 1, item=item)

    @property
    def _place(self) -> dict[str, Any]:
        """Fields of an event about the last item: the item's id and index and, if the item has content, the
        content's index, 0."""
        item = self.items[-1]
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        return place | {"content_index": 0} if "content" in item else place

    # ------------------------------------------------------------------ the last events

    def end_answer(self, choice: Choice, output: StepOutput) -> Iterator[Mapping[str, Any]]:
        complete = output.finish_reason != "length"
        if complete and all(item["type"] == "reasoning" for item in self.items):
            yield from self.begin_item(TextPart(""))  # clients look for an answer
        broken_off = choice.reader is not None and choice.reader.in_call
        yield from self.end_item(complete=complete and not broken_off)
        # Of the events that repeat a text, only the last has its log-probabilities: they are long.
        for number, logprobs in self._sent.items():
            self.items[number]["content"][0]["logprobs"] = logprobs
        response = self._response("completed" if complete else "incomplete")
        response["usage"] = self._usage(choice)
        if complete:
            response["completed_at"] = int(time.time())
        else:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._whole = response
        yield self._event(f"response.{response['status']}", response=response)

    def fail(self, error: Exception) -> Iterator[Mapping[str, Any]]:
        yield from self.end_item(complete=False)
        failure = from_exception(error)
        # OpenAI documents these three fields. Its server sends an object `error`, for which its libraries raise.
        told = {"code": failure.code, "message": failure.message, "param": failure.param}
        yield self._event("error", **told, **failure.body())
        response = self._response("failed")
        response["error"] = {"code": "server_error", "message": failure.message}  # one of OpenAI's codes
        yield self._event("response.failed", response=response)

    def _response(self, status: Any) -> ResponseObject:
        answer = self.answer
        return {
            "id": answer.id,
            "object": "response",
            "created_at": answer.created,
            "completed_at": None,
            "model": answer.model,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": self.items,
            "usage": None,
            **self._settings,  # type: ignore[typeddict-item]  # the rest of the fields
        }

    def _usage(self, choice: Choice) -> ResponseUsage:
        usage = choice.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]
            },
            "total_tokens": usage["total_tokens"],
        }


def _part(kind: str, text: str) -> dict[str, Any]:
    """Return the content part of a message or of a reasoning item. Each of these items has one."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


# ---------------------------------------------------------------------- the routes

_EVENTS = event_stream(ResponseEvent, get_args(EventType))


@router.post("/v1/responses", **answers(ResponseObject, OF_TEXT, events=_EVENTS))
@router.post("/openai/v1/responses", **answers(ResponseObject, OF_TEXT, events=_EVENTS, strict=True))
async def create_response(request: Request, service: Served, wanted: ResponsesRequest) -> Response:
    """Answer a text or a list of items, as one response or, if asked to, as an event stream."""
    return await generate(request, service, wanted, ResponseEvents, "resp_")


@router.get("/v1/responses/{response_id}", **answers(ResponseObject, [400, 404, 422]))
@router.get("/openai/v1/responses/{response_id}", **answers(ResponseObject, [400, 404]))
async def retrieve_response(
    request: Request,
    service: Served,
    response_id: str,
    stream: bool = Query(default=False, description="refused if true: events are not stored"),
) -> Response:
    """Return a stored response."""
    if stream:
        raise refused("stream", "the events of a stored response are not kept; ask for it without a stream")
    stored = service.stored.get(owner_of(request.headers), response_id)
    return Response(stored.response, media_type="application/json")


@router.delete("/v1/responses/{response_id}", **answers(DeletedResponse, [404]))
@router.delete("/openai/v1/responses/{response_id}", **answers(DeletedResponse, [404]))
async def delete_response(request: Request, service: Served, response_id: str) -> Response:
    """Forget a stored response."""
    service.stored.remove(owner_of(request.headers), response_id)
    reply: DeletedResponse = {"id": response_id, "object": "response", "deleted": True}
    return json_response(reply)


@router.get("/v1/responses/{response_id}/input_items", **answers(InputItems, [400, 404, 422]))
@router.get("/openai/v1/responses/{response_id}/input_items", **answers(InputItems, [400, 404]))
async def list_input_items(
    request: Request,
    service: Served,
    response_id: str,
    order: Literal["asc", "desc"] = "desc",
    limit: int = Query(default=20, ge=1, le=100, description="the most items of one answer"),
    after: str | None = Query(default=None, description="the id of an item: only those behind it"),
) -> Response:
    """Return the items that a stored response answers, those of earlier responses included."""
    items = service.stored.get(owner_of(request.headers), response_id).input_items(response_id)
    if order == "desc":
        items.reverse()
    places = {item["id"]: place for place, item in enumerate(items)}
    if after is not None and after not in places:
        raise refused("after", f"the response has no item {shorten(after, 100)!r}")
    items = items[0 if after is None else places[after] + 1 :]
    page = items[:limit]
    reply: InputItems = {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }
    return json_response(reply)


@router.post("/v1/responses/input_tokens", **answers(InputTokens, OF_BODIES))
@router.post("/openai/v1/responses/input_tokens", **answers(InputTokens, OF_BODIES, strict=True))
async def count_input_tokens(request: Request, service: Served, wanted: ResponsesRequest) -> Response:
    """Return the number of tokens of the prompt that the body of a response becomes."""

    def count() -> InputTokens:
        return {"object": "response.input_tokens", "input_tokens": service.intake.count(wanted)}

    return await convert(request, service, count)
