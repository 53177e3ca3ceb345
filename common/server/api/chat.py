"""The body of `POST /v1/chat/completions`, and the fields of all bodies that hold a conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field
from pydantic_core import from_json

from common.constrained.grammar import Grammar
from common.constrained.tool_calls import Function, ToolUse, behind_thought, told_in_messages
from common.errors import InvalidGrammarError, InvalidRequestError
from common.server.api.answer_forms import naming
from common.server.api.bodies import BODY, refused
from common.server.api.chat_messages import ChatMessage, Content, Messages, refuse_long, text_of
from common.server.api.tools import CHOICE, ToolChoice, Tools, functions_of, log_once, tool_use_of
from common.server.api.wanted import GenerationRequest, NewTokens, Whole
from common.server.errors import shorten
from common.text.chat_template import FOR_TOOLS, RESERVED, ChatTemplate
from common.text.conversation import continues, joined
from common.text.dialect import Dialect

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORT = (
    "how much the model reasons before it answers: a variable of some templates; for templates with the variable "
    "`enable_thinking`, `none` turns thoughts off; otherwise it changes nothing"
)
VERBOSITY = "how long the answer is, if the template has the variable `verbosity`"


class TemplateOptions(BaseModel):
    """Fields that say how a conversation becomes the text of a prompt (by the model's chat template)."""

    add_generation_prompt: bool | None = Field(
        default=None,
        description="whether the model is to begin a message of its own; default: unless it continues one",
    )
    continue_final_message: bool | None = Field(
        default=None,
        description="the model goes on with the last message instead of answering it; default: if it is the "
        "assistant's, and `add_generation_prompt` is not given",
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="variables for the template, such as `enable_thinking`"
    )
    tools: Tools | None = Field(
        default=None, description="functions that the model may call, each with a name and a JSON Schema"
    )

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
        """The functions in the field `tools`.

        Raises:
            ApiError: as `functions_of`.
        """
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
        if has_tools and dialect.knows_tools:
            template = template.for_tools
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
        """Refuse messages, tools and template options that are invalid, not implemented, or contradict each other.

        Raises:
            ApiError: 422.
        """
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

    parallel_tool_calls: bool | None = Field(
        default=True, description="an answer may have several calls; false: one at most"
    )

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

    def grammar_in(self, dialect: Dialect) -> tuple[str, Grammar] | None:
        return self._grammar_of(self.tool_use, dialect)

    def usable_grammar(
        self, dialect: Dialect, check: Callable[[Grammar], None]
    ) -> tuple[str, Grammar] | None:
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
        begins = self._begins_message(self.turns[-1]) is True
        thinking = begins and dialect.opens_thought(variables)
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
    """Return a grammar's JSON Schema. None if the grammar is of another kind, or its schema is no JSON object, or
    it is nested too deeply."""
    try:
        schema = from_json(grammar.text) if grammar.kind == "json_schema" else None
    except ValueError:
        return None
    return schema if isinstance(schema, dict) else None


class Prediction(BaseModel):
    """A text that the client expects the answer to resemble, such as the file that it asks to change."""

    model_config = BODY

    type: Literal["content"]
    content: Content


class ChatRequest(ConversationRequest):
    """The body of `POST /v1/chat/completions`. null means the default, for all but `messages`."""

    messages: Messages = Field(
        description="each with a `role` and a `content`: a text, or parts of type text"
    )
    max_completion_tokens: NewTokens = Field(
        default=None, description="at most as many as fit after the conversation, which is the default"
    )
    max_tokens: NewTokens = Field(default=None, description="the older name of `max_completion_tokens`")
    logprobs: bool | None = Field(
        default=False, description="the log-probability of each sampled token is returned"
    )
    top_logprobs: Whole | None = Field(
        default=None,
        ge=0,
        le=20,
        description="with `logprobs`: the log-probabilities of so many of the likeliest tokens, too",
    )
    reasoning_effort: ReasoningEffort | None = Field(default=None, description=EFFORT)
    verbosity: str | None = Field(default=None, description=VERBOSITY)
    prediction: Prediction | None = Field(
        default=None,
        description="text that the answer will probably contain; where it does, phase 10 answers faster; it "
        "changes no answer",
    )

    tool_choice: ToolChoice | None = Field(default=None, description=CHOICE)

    store: bool | None = Field(default=False, description="chats are not stored")

    @property
    def turns(self) -> Sequence[ChatMessage]:
        return self.messages

    @property
    def hints(self) -> dict[str, str | None]:
        return {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}

    @property
    def predicted_text(self) -> str:
        return "" if self.prediction is None else text_of(self.prediction.content)

    def echo_of(self, number: int) -> str:  # noqa: ARG002 - there is one
        last = self.messages[-1]
        return text_of(last.content) if last.role == "assistant" else ""

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
