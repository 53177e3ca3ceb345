"""The body of `POST /v1/completions`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Discriminator, Field, Tag

from common.server.api.answer_forms import Text
from common.server.api.bodies import refused
from common.server.api.wanted import GenerationRequest, Shown, TokenId, Whole, no_limit
from common.text.dialect import Dialect

#: The tag of a prompt that is a list, by the type of its first item.
_LIST_FORMS: dict[type, str] = {
    int: "as tokens",
    float: "as tokens",
    bool: "as tokens",
    str: "as texts",
    list: "as token lists",
}


def _prompt_form(prompt: Any) -> str | None:
    """Return the tag for the type of a prompt's value; None: no type fits.

    Without tags, pydantic would try all types, and report a bad token id once for each type.
    """
    if type(prompt) is str:
        return "as text"
    if type(prompt) is not list:
        return None
    return _LIST_FORMS.get(type(prompt[0])) if prompt else "as tokens"


Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[Text], Field(min_length=1, fail_fast=True)]
TokenLists = Annotated[list[Tokens], Field(min_length=1, fail_fast=True)]
Prompt = Annotated[
    Annotated[Text, Tag("as text")]
    | Annotated[Tokens, Tag("as tokens")]
    | Annotated[Texts, Tag("as texts")]
    | Annotated[TokenLists, Tag("as token lists")],
    Discriminator(
        _prompt_form,
        custom_error_type="prompt_type",
        custom_error_message="Input should be a string, a list of strings, a list of token ids, or a list of "
        "lists of token ids",
    ),
]


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`. null means the default, for all but `prompt`."""

    places: ClassVar[tuple[str, ...]] = ("all bodies", "completions")
    adds_special_tokens_by_default: ClassVar[bool] = True
    default_new_tokens: ClassVar[int | None] = 128

    prompt: Prompt = Field(
        description="one prompt or several; special tokens are added to text, not to token ids"
    )
    max_tokens: Annotated[Annotated[Whole, Field(ge=0)] | None, BeforeValidator(no_limit)] = Field(
        default=None,
        description="default: 128, or fewer if fewer fit; 0 computes only the prompt, for `echo` or "
        "`prompt_logprobs`",
    )
    logprobs: Annotated[
        Annotated[Whole, Field(ge=0, le=20)] | None,
        BeforeValidator(lambda value: None if value is False else value),
    ] = Field(
        default=None,
        description="log-probabilities of each sampled token, and of so many of the likeliest tokens",
    )
    best_of: Whole | None = Field(default=None, ge=1, description="must equal n, since every choice is sent")

    @property
    def num_prompts(self) -> int:
        return len(self.prompts(Dialect()))

    def prompts(self, dialect: Dialect) -> list[str] | list[list[int]]:  # noqa: ARG002 - chat's
        """Return all prompts as a list, even if the body has a single prompt that is not in a list."""
        prompt: Any = self.prompt
        return prompt if _prompt_form(prompt) in ("as texts", "as token lists") else [prompt]

    @property
    def max_new_tokens(self) -> int | None:
        """The largest number of tokens to sample; None: `default_new_tokens`. If `max_tokens` is 0, one token is
        sampled, and the answer leaves it out."""
        return None if self.max_tokens is None else max(1, self.max_tokens)

    @property
    def reported_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def scored_prompt(self) -> int | None:
        wanted = [super().scored_prompt, self.logprobs if self.echo else None]
        return max((each for each in wanted if each is not None), default=None)

    @property
    def shown(self) -> Shown:
        return dataclasses.replace(super().shown, logprobs=self.logprobs, prompt_only=self.max_tokens == 0)

    def echo_of(self, number: int) -> str | None:
        text = self.prompts(Dialect())[number]
        return text if isinstance(text, str) and self.truncate_prompt_tokens is None else None

    def _check_fields(self) -> None:
        super()._check_fields()
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise refused("max_tokens", "0 only with echo or prompt_logprobs; send at least 1")
        if self.max_tokens == 0 and self.min_tokens:
            raise refused("min_tokens", f"{self.min_tokens} is more than max_tokens, 0")
        if self.best_of is not None and self.best_of != self.choices_per_prompt:
            raise refused("best_of", "not implemented; send the value of n, or leave it out")
