"""Bodies that hold a conversation: `POST /v1/chat/completions`, and `POST /tokenize` with `POST /detokenize`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, ValidationInfo, field_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from common.calls import Call, Function, ToolUse, behind_thought, told_in_messages
from common.chat_template import RESERVED
from common.dialect import Dialect
from common.errors import InvalidRequestError
from common.grammar import Grammar
from common.server.bodies import BODY, Body, Limits, check_model, refused
from common.server.errors import shorten
from common.server.requests.generation import GenerationRequest, TokenId, by_type
from common.server.requests.known_fields import (
    OLD_TOOLS,
    OpenAIChatFields,
    OpenAIMessageFields,
    TemplateFields,
    VllmChatFields,
)
from common.server.requests.tools import (
    CHOICE,
    NamedTool,
    ToolCall,
    ToolChoice,
    Tools,
    functions_of,
    tool_use_of,
)


class TextPart(BaseModel):
    """A part of a message."""

    model_config = BODY

    type: Literal["text"]
    text: str


class OtherPart(BaseModel):
    """A part of another type, such as an image. `ChatMessage.check` refuses it by its type's name."""

    type: str


def _part_form(part: Any) -> str:
    """Return the tag of the model to validate a part with. A part without a type is refused as a text part."""
    other = isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] != "text"
    return "as another part" if other else "as a text part"


Part = Annotated[
    Annotated[TextPart, Tag("as a text part")] | SkipJsonSchema[Annotated[OtherPart, Tag("as another part")]],
    Discriminator(_part_form),
]
Content = Annotated[
    Annotated[str, Tag("as text")]
    | Annotated[list[Part], Field(min_length=1, max_length=256, fail_fast=True), Tag("as parts")],
    Discriminator(
        by_type({str: "as text", list: "as parts"}),
        custom_error_type="content_type",
        custom_error_message="Input should be a string, or a list of parts of type text",
    ),
]


def _joined(content: Any) -> str:
    """Return a checked content's text; parts stand on lines of their own."""
    return (
        content or "" if content is None or isinstance(content, str) else "\n".join(p.text for p in content)
    )


def _check_parts(name: str, content: Any) -> None:
    """Refuse parts that are not text. `name` is the content's place in the body. Raises ApiError."""
    for number, part in enumerate(content or ()):
        if isinstance(part, OtherPart):
            kind = shorten(part.type, 40)
            raise refused(
                f"{name}[{number}].type", f"{kind!r} is refused: only parts of type 'text' are read"
            )


class ChatMessage(OpenAIMessageFields):
    """A message of a conversation. An answer's `message` can be sent back as it is."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"] = Field(
        json_schema_extra={"enum": ["system", "developer", "user", "assistant", "tool"]}
    )
    content: Content | None = Field(
        default=None,
        validate_default=True,
        description="a text, or parts of type text, which stand on lines of their own; null, which is an empty "
        "text, for an assistant only",
    )
    name: str | None = Field(default=None, description="for templates that show it")
    tool_calls: Annotated[list[ToolCall], Field(max_length=128, fail_fast=True)] | None = Field(
        default=None, description="an assistant's calls, as its answer had them"
    )
    reasoning_content: str | None = Field(
        default=None,
        description="an assistant's thoughts, as its answer had them; the template may leave them out",
    )
    reasoning: str | None = Field(default=None, description="another name of the same")
    tool_call_id: str | None = Field(
        default=None, max_length=256, description="of the call whose result a `tool` message has"
    )

    @field_validator("content")
    @classmethod
    def _only_an_assistants_may_be_null(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and info.data.get("role") != "assistant":
            raise PydanticCustomError("missing", "Field required: a string, or a list of parts of type text")
        return content

    @property
    def calls(self) -> list[Call]:
        return [call.as_call() for call in self.tool_calls or ()]

    def for_template(self, called: Mapping[str, str]) -> dict[str, Any]:
        """Return the message as a chat template reads it. `called` has the function of each earlier call, by id."""
        name = self.name
        if self.role == "tool" and name is None:
            name = called.get(self.tool_call_id or "")
        given = {
            "name": name,
            "reasoning_content": self.reasoning_content or self.reasoning or None,
            "tool_call_id": self.tool_call_id,
            "tool_calls": [call.for_template() for call in self.calls] or None,
        }
        message: dict[str, Any] = {"role": self.role, "content": _joined(self.content)}
        return message | {field: value for field, value in given.items() if value is not None}

    def check(self, name: str) -> None:
        """Refuse calls in other messages than an assistant's, and parts that are not text. `name` is the message's
        place in the body.

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
        _check_parts(f"{name}.content", self.content)


# Bounded, as are the parts of each: two megabytes of empty messages would block the event loop for half a second.
Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=2048, fail_fast=True)]


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORT = "how much the model reasons before it answers, if its template has the variable `reasoning_effort`"


class TemplateOptions(TemplateFields):
    """Fields that say how a conversation becomes a text."""

    add_generation_prompt: bool | None = Field(
        default=None,
        description="whether the model is to begin a message of its own; default: unless it continues one",
    )
    continue_final_message: bool | None = Field(
        default=False, description="the model goes on with the last message instead of answering it"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="variables for the template, such as `enable_thinking`"
    )
    tools: Tools | None = Field(
        default=None, description="functions that the model may call, each with a name and a JSON Schema"
    )

    @property
    def effort(self) -> ReasoningEffort | None:
        """How much the model is to reason, a variable of some templates; None: as the template has it."""
        return None

    @cached_property
    def told_functions(self) -> tuple[Function, ...]:
        """The functions among `tools`. Raises ApiError: see `functions_of`."""
        return functions_of(self.tools or ())

    def render(self, messages: Sequence[ChatMessage], dialect: Dialect, functions: Sequence[Function]) -> str:
        """Return the text that the model reads. It is told of `functions`.

        Raises:
            InvalidRequestError: the model has no template, or its template does not take these messages or the
                effort, or the dialect has no tools.
        """
        template = dialect.template
        if template is None:
            raise InvalidRequestError(
                "this model has no chat template, so nothing says how it reads a conversation; "
                "POST /v1/completions continues text",
                param="messages",
            )
        variables = dict(self.chat_template_kwargs or {})
        if self.effort is not None:
            if not template.reads("reasoning_effort"):
                raise InvalidRequestError(
                    "the model's chat template has no variable reasoning_effort; leave it out",
                    param="reasoning_effort",
                )
            variables["reasoning_effort"] = self.effort
        called = {call.id: call.name for message in messages for call in message.calls}
        told = [message.for_template(called) for message in messages]
        if functions:
            require_tools(dialect)
        if not dialect.knows_tools and (functions or any(each["role"] == "tool" for each in told) or called):
            told = told_in_messages(dialect.calls or "hermes", told, functions)
            functions = ()
        return template.render(
            told,
            add_generation_prompt=self._begins_message,
            continue_final_message=bool(self.continue_final_message),
            variables=variables,
            tools=[function.as_tool() for function in functions] or None,
        )

    @property
    def _begins_message(self) -> bool:
        given = self.add_generation_prompt
        return not self.continue_final_message if given is None else given

    def check_messages(self, messages: Sequence[ChatMessage]) -> None:
        """Refuse messages that use features not implemented, and fields that contradict each other.

        Raises:
            ApiError: 422.
        """
        for number, message in enumerate(messages):
            message.check(f"messages[{number}]")
        functions_of(self.tools or ())
        if self.continue_final_message and self._begins_message:
            raise refused("continue_final_message", "not together with add_generation_prompt; send one")
        reserved = RESERVED.intersection(self.chat_template_kwargs or ())
        if reserved:
            name = min(reserved)
            raise refused(
                f"chat_template_kwargs.{name}", "not a variable of a template's own; see the body's fields"
            )


def require_tools(dialect: Dialect) -> None:
    """Raise InvalidRequestError if a dialect has no tool calls."""
    if dialect.calls is None:
        raise InvalidRequestError(
            "tools: this server finds no tool calls in answers (it runs with --tool-call-parser none); "
            "response_format with type json_schema gives answers of a form",
            param="tools",
        )


class ConversationRequest(GenerationRequest, TemplateOptions):
    """A request to answer a conversation, perhaps by calls of tools."""

    adds_special_tokens_by_default: ClassVar[bool] = False  # the template writes the special tokens
    has_parts: ClassVar[bool] = True

    parallel_tool_calls: bool | None = Field(
        default=True, description="an answer may have several calls; false: one at most"
    )

    @property
    def turns(self) -> Sequence[ChatMessage]:
        raise NotImplementedError

    @property
    def num_prompts(self) -> int:
        return 1

    def prompts(self, dialect: Dialect) -> list[str]:
        use = self.tool_use
        return [self.render(self.turns, dialect, () if use is None else use.shown)]

    def grammar_in(self, dialect: Dialect) -> tuple[str, Grammar] | None:
        use, plain = self.tool_use, self.named_grammar
        schema = None if plain is None else _schema_of(plain[1])
        thinking = self._begins_message and dialect.opens_thought(self.chat_template_kwargs)
        if use is None:
            if plain is None or schema is None or not dialect.thinks:
                return plain
            return plain[0], behind_thought(schema, dialect, thinking=thinking)
        require_tools(dialect)
        grammar = use.grammar(dialect, thinking=thinking, otherwise=schema)
        return None if grammar is None else ("tools", grammar)

    def _check_form(self) -> None:
        super()._check_form()
        if self.tool_use is None or self.named_grammar is None:
            return
        field, grammar = self.named_grammar
        if grammar.kind != "json_schema":
            raise refused(
                field, "not together with tools, beside which an answer is text or follows a JSON Schema"
            )
        if _schema_of(grammar) is None:
            raise refused(field, "no JSON Schema")


def _schema_of(grammar: Grammar) -> dict[str, Any] | None:
    """Return the JSON Schema of a grammar; None if it is another grammar, or no object."""
    try:
        schema = json.loads(grammar.text) if grammar.kind == "json_schema" else None
    except ValueError:
        return None
    return schema if isinstance(schema, dict) else None


class Prediction(BaseModel):
    """A text that the client expects the answer to resemble, such as the file that it asks to change."""

    model_config = BODY

    type: Literal["content"]
    content: Content


class ChatRequest(ConversationRequest, OpenAIChatFields, VllmChatFields):
    """The body of `POST /v1/chat/completions`. null means the default, for all but `messages`."""

    messages: Messages = Field(
        description="each with a `role` and a `content`: a text, or parts of type text, a line each"
    )
    max_completion_tokens: int | None = Field(
        default=None, ge=1, description="default: as many as fit behind the conversation"
    )
    max_tokens: int | None = Field(default=None, ge=1, description="the older name of the same")
    logprobs: bool | None = Field(default=False, description="what is known of each sampled token")
    top_logprobs: int | None = Field(
        default=None, ge=0, le=20, description="and of so many that were likeliest; with `logprobs`"
    )
    reasoning_effort: ReasoningEffort | None = Field(default=None, description=EFFORT)
    prediction: Prediction | None = Field(
        default=None,
        description="text that the answer will probably have; phase 10 answers quicker where it has it, and no "
        "phase answers otherwise for it",
    )

    tool_choice: ToolChoice | None = Field(default=None, description=CHOICE)

    @property
    def turns(self) -> Sequence[ChatMessage]:
        return self.messages

    @property
    def effort(self) -> ReasoningEffort | None:
        return self.reasoning_effort

    @cached_property
    def tool_use(self) -> ToolUse | None:
        choice, parallel = self.tool_choice, self.parallel_tool_calls is not False
        if isinstance(choice, NamedTool):
            return tool_use_of(self.told_functions, "required", names=[choice.function.name], parallel=False)
        if choice is None or isinstance(choice, str):
            return tool_use_of(self.told_functions, choice, parallel=parallel)
        allowed = choice.allowed_tools
        names = [tool.function.name for tool in allowed.tools]
        return tool_use_of(self.told_functions, allowed.mode, names=names, parallel=parallel)

    @property
    def predicted_text(self) -> str:
        return "" if self.prediction is None else _joined(self.prediction.content)

    def echo_of(self, number: int) -> str:  # noqa: ARG002 - there is one
        last = self.messages[-1]
        return _joined(last.content) if last.role == "assistant" else ""

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def reported_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def field_of(self, param: str) -> str:
        length = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {"prompt": "messages", "max_tokens": length}.get(param, param)

    def _check_fields(self) -> None:
        super()._check_fields()
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise refused("max_tokens", "another name of max_completion_tokens, with another value; send one")
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs", 'only with "logprobs": true')
        self.check_messages(self.messages)
        if self.prediction is not None:
            _check_parts("prediction.content", self.prediction.content)


class TokenizeRequest(Body, TemplateOptions):
    """The body of `POST /tokenize`: a text or a conversation."""

    model: str | None = Field(default=None, description="a name of the served model; default: that model")
    prompt: str | None = Field(default=None, description="a text; or else:")
    messages: Messages | None = Field(default=None, description="a conversation, as for chat")
    add_special_tokens: bool | None = Field(
        default=None, description="default: for a prompt; a conversation has its own"
    )
    return_token_strs: bool | None = Field(
        default=False, description="the tokens as the tokenizer spells them, too"
    )

    @property
    def adds_special_tokens(self) -> bool:
        return self.messages is None if self.add_special_tokens is None else self.add_special_tokens

    def text(self, dialect: Dialect) -> str:
        """Return the text to tokenize.

        Raises:
            InvalidRequestError: there is no template for these messages.
        """
        if self.messages is not None:
            return self.render(self.messages, dialect, self.told_functions)
        assert self.prompt is not None  # see `check`
        return self.prompt

    def check(self, limits: Limits) -> None:
        check_model(self.model, limits)
        if (self.prompt is None) is (self.messages is None):
            raise refused("prompt", "send either a prompt or messages")
        self.check_messages(self.messages or ())


class DetokenizeRequest(Body):
    """The body of `POST /detokenize`: token ids."""

    model: str | None = Field(default=None, description="a name of the served model; default: that model")
    tokens: list[TokenId] = Field(fail_fast=True)

    def check(self, limits: Limits) -> None:
        check_model(self.model, limits)
        unknown = next((token for token in self.tokens if token >= limits.vocab_size), None)
        if unknown is not None:
            raise refused("tokens", f"{unknown} is not in the vocabulary of {limits.vocab_size}")
