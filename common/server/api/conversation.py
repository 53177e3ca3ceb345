"""A conversation in a request's body: its messages, and the fields of all bodies that hold one.

The items of responses and Anthropic's messages become messages of chat, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic_core import from_json

from common.constrained.grammar import Grammar
from common.constrained.tool_calls import (
    Function,
    ToolUse,
    behind_thought,
    told_in_messages,
    with_short_ids,
)
from common.errors import InvalidGrammarError, InvalidRequestError
from common.server.api.bodies import OLD_TOOLS, Fields, OneText, Parts, by_type
from common.server.api.tools import ToolCall, Tools, functions_of, log_once, tool_use_of
from common.server.api.wanted import GenerationRequest, naming
from common.server.errors import refused, shorten
from common.text.chat_template import FOR_TOOLS, RESERVED, ChatTemplate
from common.text.conversation import continues, joined
from common.text.dialect import Dialect


class TextPart(Fields):
    """A part of a message's content: a text."""

    type: Literal["text"]
    text: str


Content = Annotated[OneText | Parts[TextPart], by_type("a string, or a list of parts of type text")]


def text_of(content: Any) -> str:
    """Return the text of a message's content, whose parts are joined with nothing between."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


class ChatMessage(Fields):
    """A message of a conversation. An answer's `message` can be sent back as it is."""

    places: ClassVar[tuple[str, ...]] = ("messages",)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"] = Field(
        json_schema_extra={"enum": ["system", "developer", "user", "assistant", "tool"]}
    )
    content: Content | None = None
    """a text, or a list of parts of type text; null is an empty text"""
    name: str | None = None
    """a name, which some templates show"""
    tool_calls: Annotated[list[ToolCall], Field(max_length=128, fail_fast=True)] | None = None
    """an assistant's calls, as they were in its answer"""
    reasoning_content: str | None = None
    """an assistant's thoughts, as they were in its answer; the template may leave them out"""
    reasoning: str | None = None
    """another name of `reasoning_content`"""
    provider_specific_fields: dict[str, Any] | None = None
    """litellm's copy of an answer's fields, which it sends back; not read"""
    tool_call_id: str | None = Field(default=None, max_length=256)
    """in a `tool` message: the id of the call that it answers"""

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
        """Raise ApiError (422) for the role `function`, and for fields that do not fit the message's role. `name`
        is the message's path in the body, such as `messages[0]`."""
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


# ---------------------------------------------------------------------- fields of bodies

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORT = (
    "how much the model reasons before it answers: a variable of some templates; for templates with the variable "
    "`enable_thinking`, `none` turns thoughts off; otherwise it changes nothing"
)
VERBOSITY = "how long the answer is, if the template has the variable `verbosity`"


class TemplateOptions(Fields):
    """Fields that say how a conversation becomes the text of a prompt (by the model's chat template)."""

    add_generation_prompt: bool | None = None
    """whether the model is to begin a message of its own; default: unless it continues one"""
    continue_final_message: bool | None = None
    """the model goes on with the last message instead of answering it; default: if it is the assistant's, and
    `add_generation_prompt` is not given"""
    chat_template_kwargs: dict[str, Any] | None = None
    """variables for the template, such as `enable_thinking`"""
    tools: Tools | None = None
    """functions that the model may call, each with a name and a JSON Schema"""

    @property
    def hints(self) -> dict[str, str | None]:
        """Values for variables that some templates have, by name; None: the template's default."""
        return {}

    def variables(self, template: ChatTemplate) -> dict[str, Any]:
        """Return the variables for a template: `chat_template_kwargs`, and the hints that the template reads."""
        given = {name: value for name, value in self.hints.items() if value is not None}
        effort = given.get("reasoning_effort")
        hints: dict[str, Any] = given if effort is None else given | {"enable_thinking": effort != "none"}
        read = {name: value for name, value in hints.items() if template.reads(name)}
        return read | (self.chat_template_kwargs or {})

    @cached_property
    def told_functions(self) -> tuple[Function, ...]:
        """The functions in the field `tools`. Raises ApiError as `functions_of`."""
        return functions_of(
            {f"tools[{i}]": tool.function.as_function() for i, tool in enumerate(self.tools or ())}
        )

    def render(self, messages: Sequence[ChatMessage], dialect: Dialect, functions: Sequence[Function]) -> str:
        """Return the conversation as the text that the model reads, with descriptions of `functions`.

        Raises:
            InvalidRequestError: the model has no chat template; the template does not take these messages; or
                there are functions, and the server finds no tool calls in answers.
        """
        template = dialect.template
        if template is None:
            raise InvalidRequestError(
                "this model has no chat template, so nothing says how it reads a conversation; "
                "POST /v1/completions continues text",
                param="messages",
            )
        called = {call.id: call.function.name for message in messages for call in message.tool_calls or ()}
        has_tools = bool(functions or called) or any(message.role == "tool" for message in messages)
        told = [message.for_template(called) for message in messages]
        if functions:
            require_tools(dialect)
        # A template for tools alone need not accept a conversation without any.
        takes_these = bool(functions) or template.for_tools is template
        if has_tools and dialect.knows_tools and takes_these:
            template = template.for_tools
            told = with_short_ids(told) if dialect.calls == "mistral" else told
        elif has_tools:
            texts = [{**message, "content": joined(message["content"])} for message in told]
            told = told_in_messages(dialect.calls or "hermes", texts, functions)
            functions = ()
        return template.render(
            told,
            add_generation_prompt=self._begins_message(messages[-1]),
            continue_final_message=self.continue_final_message,
            variables=self.variables(template),
            tools=[function.as_tool() for function in functions] or None,
        )

    def _begins_message(self, last: ChatMessage) -> bool | None:
        """Return whether the model begins a message of its own, or None if it continues the last message."""
        given = self.add_generation_prompt, self.continue_final_message
        if self.add_generation_prompt is not None or continues(last.role, bool(last.tool_calls), *given):
            return self.add_generation_prompt
        return True

    def check_messages(self, messages: Sequence[ChatMessage]) -> None:
        """Raise ApiError (422) for messages, tools and template options that are invalid or contradictory."""
        refuse_long("messages", messages)
        for number, message in enumerate(messages):
            message.check(f"messages[{number}]")
        _ = self.told_functions  # refused here, if at all
        if self.continue_final_message and self.add_generation_prompt:
            raise refused("continue_final_message", "not together with add_generation_prompt; send one")
        variables = self.chat_template_kwargs or {}
        if "chat_template" in variables:
            raise refused(
                "chat_template_kwargs.chat_template",
                f"{shorten(str(variables['chat_template']), 40)!r} is refused: conversations with tools get the "
                f"checkpoint's template {FOR_TOOLS!r}, and all others its template 'default'",
            )
        reserved = RESERVED.intersection(variables)
        if reserved:
            name = min(reserved)
            raise refused(
                f"chat_template_kwargs.{name}", "not a variable of a template's own; see the body's fields"
            )


def require_tools(dialect: Dialect) -> None:
    """Raise InvalidRequestError if the dialect has no syntax for tool calls, so that none are found in answers."""
    if dialect.calls is None:
        raise InvalidRequestError(
            "tools: this server finds no tool calls in answers (it runs with --tool-call-parser none); "
            "response_format with type json_schema gives answers of a form",
            param="tools",
        )


class ConversationRequest(GenerationRequest, TemplateOptions):
    """A request to answer a conversation, perhaps by calls of tools."""

    places: ClassVar[tuple[str, ...]] = ("all bodies", "conversations")
    adds_special_tokens_by_default: ClassVar[bool] = False  # the template writes the special tokens
    has_parts: ClassVar[bool] = True
    cuts_max_tokens: ClassVar[bool] = True

    parallel_tool_calls: bool | None = True
    """an answer may have several calls; false: one at most"""

    tool_choice: Any = None  # each body has a type of its own

    @property
    def turns(self) -> Sequence[ChatMessage]:
        raise NotImplementedError

    @cached_property
    def tool_use(self) -> ToolUse | None:
        choice, functions = self.tool_choice, self.told_functions
        parallel = self.parallel_tool_calls is not False
        if choice in (None, "none", "auto", "required"):
            return tool_use_of(functions, choice, parallel=parallel)
        if choice.type == "function":
            return tool_use_of(functions, "required", names=self.known_as(choice.called), parallel=False)
        allowed = choice.allowed_tools
        names = [name for tool in allowed.tools for name in self.known_as(tool.called)]
        return tool_use_of(functions, allowed.mode, names=names, parallel=parallel)

    def known_as(self, name: str) -> Sequence[str]:
        """Return the names under which the model knows the functions that `tool_choice` names `name`."""
        return [name]

    @property
    def num_prompts(self) -> int:
        return 1

    def prompts(self, dialect: Dialect) -> list[str]:
        use = self.tool_use
        return [self.render(self.turns, dialect, () if use is None else use.shown)]

    def field_of(self, param: str) -> str:
        return {"prompt": "messages"}.get(param, param)

    def grammar_in(self, dialect: Dialect) -> tuple[str, Grammar] | None:
        """Return the path of the field that restricts the answer, and its grammar; None: the answer is any text.

        Raises:
            InvalidRequestError: the dialect has no syntax for the tool calls that the request asks for, or their
                grammar would be too long.
        """
        return self._grammar_of(self.tool_use, dialect)

    def usable_grammar(
        self, dialect: Dialect, check: Callable[[Grammar], None]
    ) -> tuple[str, Grammar] | None:
        """Return what `grammar_in` returns, but calls need not follow a schema that no grammar can follow.

        `check` raises InvalidGrammarError for a grammar that cannot be used, and may block.

        Raises:
            InvalidRequestError: as `grammar_in`; InvalidGrammarError: a call is required and has such a schema.
        """
        use = self.tool_use

        def checked(use: ToolUse | None) -> tuple[str, Grammar] | None:
            named = self._grammar_of(use, dialect)
            if named is not None:
                with naming(named[0]):
                    check(named[1])
            return named

        try:
            return checked(use)
        except InvalidGrammarError:
            if use is None or not use.followed:
                raise
            reasons = use.refusals(dialect, check)
            for name, reason in reasons.items():
                if use.required:
                    raise InvalidGrammarError(f"tools: function {name!r}: {reason}", param="tools") from None
                log_once(f"tools: calls of {name!r} need not follow its schema: {shorten(reason, 200)}")
            if use.required:
                raise
        try:
            return checked(use.without_schemas(reasons))
        except InvalidGrammarError as error:
            log_once(f"tools: calls need not follow their schemas: {shorten(str(error), 200)}")
            return checked(use.without_schemas(use.names))

    def _grammar_of(self, use: ToolUse | None, dialect: Dialect) -> tuple[str, Grammar] | None:
        plain = self.named_grammar
        schema = None if plain is None else _schema_of(plain[1])
        variables = None if dialect.template is None else self.variables(dialect.template)
        last = self.turns[-1]
        begins = self._begins_message(last)
        if begins is None and self.continue_final_message is None:  # an empty message is begun
            begins = not (text_of(last.content).strip() or last.reasoning_content or last.reasoning)
        thinking = begins is True and dialect.opens_thought(variables)
        if use is None:
            if plain is None or schema is None or not dialect.thinks:
                return plain
            return plain[0], behind_thought(schema, dialect, thinking=thinking)
        require_tools(dialect)
        grammar = use.grammar(dialect, thinking=thinking, otherwise=schema)
        return None if grammar is None else (plain[0] if plain and not use.followed else "tools", grammar)

    def _check_form(self) -> None:
        super()._check_form()
        if self.tool_use is None or self.named_grammar is None:
            return
        field, grammar = self.named_grammar
        if self.tool_use.required:
            raise refused(field, "not together with a tool_choice that requires a call; send one")
        if grammar.kind != "json_schema":
            raise refused(
                field, "not together with tools, beside which an answer is text or follows a JSON Schema"
            )
        if _schema_of(grammar) is None:
            raise refused(field, "no JSON Schema")


def _schema_of(grammar: Grammar) -> dict[str, Any] | None:
    """Return a grammar's JSON Schema; None if it has none, or one that is no object or nested too deeply."""
    try:
        schema = from_json(grammar.text) if grammar.kind == "json_schema" else None
    except ValueError:
        return None
    return schema if isinstance(schema, dict) else None
