"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from typing import Annotated, ClassVar

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from common.server.api.bodies import Body, Limits, check_model
from common.server.api.conversation import Messages, TemplateOptions
from common.server.api.wanted import TokenId
from common.server.errors import refused
from common.server.routes import OF_BODIES, JsonRoute, answers, convert
from common.server.service import Served
from common.text.dialect import Dialect

router = APIRouter(route_class=JsonRoute)


class TokenizeRequest(Body, TemplateOptions):
    """The body of `POST /tokenize`: a text or a conversation."""

    places: ClassVar[tuple[str, ...]] = ("conversations",)

    model: str | None = None
    """a name of the served model; default: that model"""
    prompt: str | None = None
    """a text, or else `messages`"""
    messages: Messages | None = None
    """a conversation, as for chat"""
    add_special_tokens: bool | None = None
    """default: true for a prompt, false for a conversation, whose template adds them"""
    return_token_strs: bool | None = False
    """the spelling of each token in the vocabulary is returned, too"""

    @property
    def adds_special_tokens(self) -> bool:
        return self.messages is None if self.add_special_tokens is None else self.add_special_tokens

    def text(self, dialect: Dialect) -> str:
        """Return the text to tokenize.

        Raises:
            InvalidRequestError: a conversation cannot be rendered (see `render`).
        """
        if self.messages is not None:
            return self.render(self.messages, dialect, self.told_functions)
        assert self.prompt is not None  # see `check`
        return self.prompt

    def check(self, limits: Limits) -> None:
        check_model(self.model or None, limits)
        if (self.prompt is None) is (self.messages is None):
            raise refused("prompt", "send either a prompt or messages")
        self.check_messages(self.messages or ())


class DetokenizeRequest(Body):
    """The body of `POST /detokenize`: token ids."""

    model: str | None = None
    """a name of the served model; default: that model"""
    tokens: list[TokenId] = Field(fail_fast=True)

    def check(self, limits: Limits) -> None:
        check_model(self.model or None, limits)
        unknown = next((token for token in self.tokens if token >= limits.vocab_size), None)
        if unknown is not None:
            raise refused("tokens", f"{unknown} is not in the vocabulary of {limits.vocab_size}")


class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: Annotated[list[str] | None, Field(description="as the tokenizer spells them, if asked for")]


class Text(TypedDict):
    prompt: str


@router.post("/tokenize", **answers(Tokens, OF_BODIES))
async def tokenize(request: Request, service: Served, wanted: TokenizeRequest) -> Response:
    """Return the token ids of a text, or of a conversation as chat renders it."""

    def encode() -> Tokens:
        text = wanted.text(service.dialect)
        tokens = service.intake.encode(text, add_special_tokens=wanted.adds_special_tokens)
        spelled = service.engine.maker.tokenizer.spelled
        return {
            "count": len(tokens),
            "max_model_len": service.engine.facts.max_seq_len,
            "tokens": tokens,
            "token_strs": [spelled(token) for token in tokens] if wanted.return_token_strs else None,
        }

    return await convert(request, service, encode)


@router.post("/detokenize", **answers(Text, OF_BODIES))
async def detokenize(request: Request, service: Served, wanted: DetokenizeRequest) -> Response:
    """Return the text of token ids, special tokens included."""

    def decode() -> Text:
        return {"prompt": service.engine.maker.tokenizer.decode(wanted.tokens, skip_special_tokens=False)}

    return await convert(request, service, decode)
