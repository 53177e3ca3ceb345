"""Bodies that hold a conversation: `POST /v1/chat/completions`, and `POST /tokenize` with `POST /detokenize`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, ValidationInfo, field_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from common.chat_template import RESERVED, ChatTemplate
from common.errors import InvalidRequestError
from common.server.bodies import BODY, Body, Limits, check_model, refused
from common.server.errors import shorten
from common.server.requests.generation import GenerationRequest, TokenId, by_type
from common.server.requests.known_fields import (
    TOOLS,
    OpenAIChatFields,
    OpenAIMessageFields,
    TemplateFields,
    VllmChatFields,
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
        json_schema_extra={"enum": ["system", "developer", "user", "assistant"]}
    )
    content: Content | None = Field(
        default=None,
        validate_default=True,
        description="a text, or parts of type text, which stand on lines of their own; null, which is an empty "
        "text, for an assistant only",
    )
    name: str | None = Field(default=None, description="for templates that show it")
    tool_calls: list[Any] | None = Field(
        default=None, description=f"only null or []: {TOOLS}", json_schema_extra={"maxItems": 0}
    )
    tool_call_id: str | None = Field(
        default=None, description=f"only null: {TOOLS}", json_schema_extra={"enum": [None]}
    )

    @field_validator("content")
    @classmethod
    def _only_an_assistants_may_be_null(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and info.data.get("role") != "assistant":
            raise PydanticCustomError("missing", "Field required: a string, or a list of parts of type text")
        return content

    def for_template(self) -> dict[str, str]:
        """Return the message as a chat template reads it."""
        return {"role": self.role, "content": _joined(self.content)} | (
            {} if self.name is None else {"name": self.name}
        )

    def check(self, name: str) -> None:
        """Refuse tool calls, and parts that are not text. `name` is the message's place in the body.

        Raises:
            ApiError: 422.
        """
        if self.role in ("tool", "function"):
            raise refused(f"{name}.role", f"{self.role!r} is refused: {TOOLS}")
        if self.tool_calls:
            raise refused(f"{name}.tool_calls", TOOLS)
        if self.tool_call_id is not None:
            raise refused(f"{name}.tool_call_id", TOOLS)
        _check_parts(f"{name}.content", self.content)


# Bounded, as are the parts of each: two megabytes of empty messages would block the event loop for half a second.
Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=2048, fail_fast=True)]


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

    def render(self, messages: Sequence[ChatMessage], template: ChatTemplate | None) -> str:
        """Return the text that the model reads.

        Raises:
            InvalidRequestError: the model has no template, or its template does not take these messages.
        """
        if template is None:
            raise InvalidRequestError(
                "this model has no chat template, so nothing says how it reads a conversation; "
                "POST /v1/completions continues text",
                param="messages",
            )
        return template.render(
            [message.for_template() for message in messages],
            add_generation_prompt=self._begins_message,
            continue_final_message=bool(self.continue_final_message),
            variables=self.chat_template_kwargs,
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
        if self.continue_final_message and self._begins_message:
            raise refused("continue_final_message", "not together with add_generation_prompt; send one")
        reserved = RESERVED.intersection(self.chat_template_kwargs or ())
        if reserved:
            name = min(reserved)
            raise refused(
                f"chat_template_kwargs.{name}", "not a variable of a template's own; see the body's fields"
            )


class Prediction(BaseModel):
    """A text that the client expects the answer to resemble, such as the file that it asks to change."""

    model_config = BODY

    type: Literal["content"]
    content: Content


class ChatRequest(GenerationRequest, TemplateOptions, OpenAIChatFields, VllmChatFields):
    """The body of `POST /v1/chat/completions`. null means the default, for all but `messages`."""

    adds_special_tokens_by_default: ClassVar[bool] = False  # the template writes the special tokens

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
    prediction: Prediction | None = Field(
        default=None,
        description="text that the answer will probably have; phase 10 answers quicker where it has it, and no "
        "phase answers otherwise for it",
    )

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def predicted_text(self) -> str:
        return "" if self.prediction is None else _joined(self.prediction.content)

    def prompts(self, template: ChatTemplate | None) -> list[str]:
        return [self.render(self.messages, template)]

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

    def text(self, template: ChatTemplate | None) -> str:
        """Return the text to tokenize.

        Raises:
            InvalidRequestError: there is no template for these messages.
        """
        if self.messages is not None:
            return self.render(self.messages, template)
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
