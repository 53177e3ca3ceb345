"""The body of `POST /v1/responses`. The module `items` has the items of its input."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, get_args

import orjson
from pydantic import BaseModel, Field, PrivateAttr, Tag
from pydantic_core import to_json

from common.constrained.grammar import Grammar
from common.constrained.schemas import size
from common.constrained.tool_calls import Function
from common.server.api.answer_forms import naming
from common.server.api.bodies import BODY, MAX_BODY_BYTES, refused, too_large
from common.server.api.chat import EFFORT, VERBOSITY, ConversationRequest, ReasoningEffort
from common.server.api.chat_messages import ChatMessage, refuse_long
from common.server.api.items import (
    ITEMS,
    Input,
    ItemReference,
    Message,
    check_items,
    flat_name,
    message,
    messages_of,
)
from common.server.api.response_shapes import ResponseObject, Settings
from common.server.api.stored_responses import ResponseStore, Stored
from common.server.api.tools import (
    BY_CHOICE,
    CHOICE,
    FunctionFields,
    FunctionName,
    OtherTool,
    Word,
    by_kind,
    functions_of,
    log_once,
)
from common.server.api.wanted import NewTokens, Whole
from common.server.errors import shorten

Includable = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
LOGPROBS, ENCRYPTED = get_args(Includable)

#: Most bytes of the fields that a response repeats from its request. A stream has these fields three times.
MAX_SETTINGS = 2**18


class FunctionTool(FunctionFields):
    """A tool in the body of responses: a function that the model may call."""

    places: ClassVar[tuple[str, ...]] = ("tools of responses",)

    type: Literal["function"]
    strict: bool | None = Field(
        default=True,
        description="whether calls follow the schema also where `tool_choice` does not require one",
    )

    @property
    def function(self) -> FunctionTool:
        """This object, which has the function's fields. In a chat request, an inner object of this name has these
        fields."""
        return self

    def as_function(self) -> Function:
        return dataclasses.replace(super().as_function(), strict=self.strict is not False)

    def as_given(self) -> dict[str, Any]:
        """Return the tool as a response repeats it."""
        given = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", **given, "strict": self.strict is not False}


class Namespace(BaseModel):
    """A tool in the body of responses: functions under a common name, such as those of one MCP server."""

    model_config = BODY

    type: Literal["namespace"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = Field(default=None, description="a label")
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


class NamedTool(BaseModel):
    """A tool that `tool_choice` names."""

    model_config = BODY

    type: Literal["function"]
    name: FunctionName
    namespace: str | None = Field(default=None, max_length=128, description="of the function")

    @property
    def called(self) -> str:
        return flat_name(self.namespace, self.name)


class AllowedTools(BaseModel):
    """The tools of the body that may be called, and whether a call is required (`mode`). The model is told of all
    tools of the body."""

    model_config = BODY

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


class TextFormat(BaseModel):
    """The form of the answer: any text, a JSON object, or JSON that follows a schema."""

    model_config = BODY

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(default=None, description="with type `json_schema`, a label")
    description: str | None = Field(default=None, description="a label")
    schema_: dict[str, Any] | None = Field(
        default=None, alias="schema", description="with type `json_schema`: a JSON Schema"
    )
    strict: bool | None = Field(default=None, description="whatever it is, every answer follows the schema")


class TextOptions(BaseModel):
    """The field `text` of the body, with the form of the answer."""

    model_config = BODY

    format: TextFormat | None = None
    verbosity: str | None = Field(default=None, description=VERBOSITY)


class ReasoningOptions(BaseModel):
    """The field `reasoning` of the body: how the model reasons."""

    model_config = BODY
    places: ClassVar[tuple[str, ...]] = ("reasoning",)

    effort: ReasoningEffort | None = Field(default=None, description=EFFORT)


class ResponsesRequest(ConversationRequest):
    """The body of `POST /v1/responses`. null means the default, for all but `input`."""

    places: ClassVar[tuple[str, ...]] = (
        "all bodies",
        "conversations",
        "responses, Anthropic's messages",
        "responses",
    )

    input: Input = Field(
        description="a text, or a list of items: messages, reasoning, function calls and their outputs"
    )
    instructions: str | None = Field(default=None, description="a system message before the input")
    max_output_tokens: NewTokens = Field(
        default=None, description="at most as many as fit after the conversation, which is the default"
    )
    text: TextOptions | None = Field(default=None, description="the form of the answer")
    reasoning: ReasoningOptions | None = Field(default=None, description="how the model reasons")
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = Field(  # type: ignore[assignment]  # chat has them in an envelope
        default=None,
        description="functions that the model may call, each with a name and a JSON Schema, and namespaces of such "
        "functions; tools of other types are skipped",
    )
    tool_choice: ToolChoice | None = Field(default=None, description=CHOICE)
    include: Annotated[list[Includable], Field(max_length=16)] | None = Field(
        default=None, description=f"`{LOGPROBS}`; `{ENCRYPTED}` is accepted, but reasoning is sent as text"
    )
    top_logprobs: Whole | None = Field(
        default=None, ge=0, le=20, description=f"likeliest tokens beside each; with `{LOGPROBS}` in `include`"
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        default="disabled",
        description="`auto`: a conversation that is too long is cut, and its last tokens stay",
    )
    stream: bool | None = Field(default=False, description="answer with an event stream")
    previous_response_id: str | None = Field(
        default=None, description="a stored response, whose conversation the input continues"
    )
    store: bool | None = Field(
        default=True, description="the response is stored, unless the server stores none"
    )

    _earlier: list[Any] = PrivateAttr(
        default_factory=list
    )  # items of the conversation that the input continues
    _keep: Callable[[str, bytes], None] | None = PrivateAttr(default=None)

    def recall(self, store: ResponseStore, owner: bytes) -> None:
        """Fetch the stored items that the request refers to, and note where its response is to be stored.

        Raises:
            ApiError: 404, this owner has no such response or item; 413, the whole conversation is too large.
        """
        earlier = b"[]"
        if self.previous_response_id is not None:
            earlier = store.conversation(owner, self.previous_response_id)
            self._earlier = ITEMS.validate_json(earlier)
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
        added = ITEMS.dump_json(self._items, exclude_none=True)
        conversation = added if earlier == b"[]" else earlier[:-1] + b"," + added[1:]
        if len(conversation) > MAX_BODY_BYTES:
            raise too_large("the conversation with its stored items")

        def keep(response_id: str, response: bytes) -> None:
            store.put(response_id, Stored(owner, conversation, response))

        self._keep = keep

    def keep(self, response: ResponseObject) -> None:
        """Store the response to this request, if the request and the server want that."""
        if self._keep is not None:
            self._keep(response["id"], orjson.dumps(response))

    @property
    def _items(self) -> list[Any]:
        """The items of the input."""
        given: Any = self.input
        return [Message(role="user", content=given)] if isinstance(given, str) else given

    @cached_property
    def turns(self) -> list[ChatMessage]:
        messages = [] if self.instructions is None else [message("system", self.instructions)]
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
        return {
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "verbosity": None if self.text is None else self.text.verbosity,
        }

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
        wanted = None if self.text is None else self.text.format
        return TextFormat(type="text") if wanted is None else wanted

    @cached_property
    def told_functions(self) -> tuple[Function, ...]:
        functions = {}
        for path, namespace, tool in self._tools:
            if isinstance(tool, OtherTool):
                kind = shorten(tool.type, 40)
                log_once(
                    f"/v1/responses: tools of type {kind!r} are skipped, since this server runs no tools"
                )
                continue
            function = tool.as_function()
            functions[path] = dataclasses.replace(function, name=flat_name(namespace, function.name))
        return functions_of(functions)

    @property
    def _tools(self) -> Iterator[tuple[str, str | None, FunctionTool | OtherTool]]:
        """Each tool that is no namespace: its path in the body, its namespace, and the tool."""
        tools: Any = self.tools or ()
        for number, tool in enumerate(tools):
            if not isinstance(tool, Namespace):
                yield f"tools[{number}]", None, tool
                continue
            for place, inner in enumerate(tool.tools):
                yield f"tools[{number}].tools[{place}]", tool.name, inner

    @cached_property
    def _called(self) -> dict[str, dict[str, str]]:
        """The fields of a call that name a function, by the name under which the model knows the function."""
        return {
            flat_name(namespace, tool.name): {"name": tool.name}
            | ({} if namespace is None else {"namespace": namespace})
            for _, namespace, tool in self._tools
            if isinstance(tool, FunctionTool)
        }

    def called(self, name: str) -> Mapping[str, str]:
        """Return the fields of a call that name its function. `name`: the name under which the model knows it."""
        return self._called[name]

    def known_as(self, name: str) -> Sequence[str]:
        if name in self._called:
            return [name]
        return [flat for flat, called in self._called.items() if called["name"] == name] or [name]

    def settings(self, temperature: float, top_p: float) -> Settings:
        """Return the fields of the request that a response repeats.

        Args:
            temperature: the temperature in effect.
            top_p: the `top_p` in effect.
        """
        reasoning = self.reasoning or ReasoningOptions()
        choice: Any = self.tool_choice or "auto"
        tools: Any = self.tools or ()
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": None,
            "metadata": self.metadata or {},
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
        if self.top_logprobs and self.reported_logprobs is None:
            raise refused("top_logprobs", f'only with "{LOGPROBS}" in include')
        with naming("text.format.schema"):
            settings = size([self._format.schema_, *(each.parameters for each in self.told_functions)])
        if settings <= MAX_SETTINGS:
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
        for name in ("response_format", "structured_outputs"):
            if wanted.type != "text" and getattr(self, name) is not None:
                raise refused(name, "text.format says already what answers look like; send one")


def _written(schemas: Any) -> Any:
    """Encode fields that hold JSON Schemas as JSON, which `orjson` copies: it cannot write integers over 64 bits
    itself."""
    return orjson.Fragment(to_json(schemas, inf_nan_mode="null"))
