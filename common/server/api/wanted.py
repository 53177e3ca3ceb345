"""A request for text: the fields that the bodies of all endpoints share (`GenerationRequest`)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Tag, ValidationError

from common.constrained.grammar import Grammar
from common.constrained.tool_calls import ToolUse
from common.errors import InvalidGrammarError
from common.request import SamplingParams
from common.server.api.bodies import OTHER_FORMS, Body, Fields, Limits, OneText, by_type, check_model
from common.server.errors import refused
from common.text.dialect import Dialect


def _whole(value: Any) -> Any:
    """Return a whole number that came as a float, such as 16.0, as an int, and any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def no_limit(value: Any) -> Any:
    """Return None for -1, which llama.cpp's clients send for no limit, and any other value unchanged."""
    return None if value == -1 else value


Whole = Annotated[int, BeforeValidator(_whole)]
NewTokens = Annotated[Annotated[Whole, Field(ge=1)] | None, BeforeValidator(no_limit)]

# fail_fast: only the first bad item of a list is reported, so two megabytes of bad items cost one error.
TokenId = Annotated[int, Field(ge=0)]
StopString = Annotated[str, Field(max_length=256)]
# Each string costs about a microsecond for each token of the answer.
StopStrings = Annotated[list[StopString], Field(max_length=64, fail_fast=True)]
Stop = Annotated[
    Annotated[StopString, Tag("str")] | Annotated[StopStrings, Tag("list")],
    by_type("a string or a list of strings"),
]

BadWord = Annotated[str, Field(pattern=r"\S", max_length=256)]


@dataclass(frozen=True, slots=True)
class Shown:
    """What an answer shows beside its text. Numbers are of the likeliest tokens; None: no log-probabilities."""

    echo: bool = False  # the text begins with the prompt (in a chat, with an assistant's last message)
    logprobs: int | None = None  # with each token of an echo
    prompt_logprobs: int | None = None  # with each token of the prompt, in a field of its own
    token_ids: bool = False  # of prompt and answer
    prompt_only: bool = False  # no generated tokens

    @property
    def scores_prompts(self) -> bool:
        """True if log-probabilities of prompt tokens are shown."""
        return self.prompt_logprobs is not None or (self.echo and self.logprobs is not None)


# ---------------------------------------------------------------------- the form of an answer

Text = Annotated[str, Field(min_length=1)]

JsonSchema = Annotated[
    OneText | Annotated[dict[str, Any], Tag("dict")], by_type("an object, or the JSON text of one")
]


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Context manager: name the field at `path` in an InvalidGrammarError that the block raises."""
    try:
        yield
    except InvalidGrammarError as error:
        raise InvalidGrammarError(f"{path}: {error}", param=path) from None


class JsonSchemaFormat(Fields):
    """OpenAI's object around a JSON Schema. `name` and `description` are labels: the model is not told of them."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    """a JSON Schema"""
    strict: bool | None = None
    """whatever it is, every answer follows the schema"""


class ResponseFormat(Fields):
    """OpenAI's field `response_format`: the answer is any text, a JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    """with type `json_schema`"""
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """with type `json_object`: a JSON Schema, as in llama.cpp"""
    value: dict[str, Any] | None = None
    """another name of `schema`"""

    @property
    def named_grammar(self) -> tuple[str, Grammar] | None:
        """The path of the field that restricts the answer, and the grammar it asks for; None: any text."""
        if self.json_schema is not None:
            path, schema = "response_format.json_schema.schema", self.json_schema.schema_
        elif self.type == "text":
            return None
        else:
            name, wanted = ("schema", self.schema_) if self.value is None else ("value", self.value)
            if not wanted:
                return "response_format", Grammar.json_object()
            path, schema = f"response_format.{name}", wanted
        with naming(path):
            return path, Grammar.json_schema(schema)

    def check(self) -> None:
        """Raise ApiError (422) if type `json_schema` has no schema, or another type has `json_schema`."""
        if (self.type == "json_schema") is not (self.json_schema is not None):
            raise refused(
                "response_format", "json_schema and type 'json_schema' go together; send both or neither"
            )


_GRAMMARS: dict[str, Callable[[Any], Grammar]] = {
    "json": Grammar.json_schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.context_free,
}


class StructuredOutputs(Fields):
    """vLLM's field `structured_outputs`, the form that an answer must have. Exactly one of its fields `json`,
    `regex`, `choice` and `grammar` is set."""

    places: ClassVar[tuple[str, ...]] = ("structured_outputs",)

    json_: JsonSchema | None = Field(default=None, alias="json")
    """a JSON Schema, or its JSON text"""
    regex: str | None = None
    """in the syntax of Rust's regex; matches the whole answer"""
    choice: Annotated[list[Text], Field(min_length=1, fail_fast=True)] | None = None
    """the answer is one of these"""
    grammar: str | None = None
    """in Lark's notation or llama.cpp's (GBNF)"""

    @property
    def named_grammar(self) -> tuple[str, Grammar]:
        """The path of the field that restricts the answer, and the grammar it asks for."""
        ((field, value),) = self._given.items()  # one: see `check`
        path = f"structured_outputs.{field}"
        with naming(path):
            return path, _GRAMMARS[field](value)

    def check(self) -> None:
        """Raise ApiError (422) unless exactly one of the fields json, regex, choice and grammar is given."""
        if len(self._given) != 1:
            raise refused(
                "structured_outputs", f"send one of json, regex, choice, grammar, not {len(self._given)}"
            )

    @property
    def _given(self) -> dict[str, Any]:
        """The fields among `json`, `regex`, `choice` and `grammar` that are not null, by name."""
        fields = {"json": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        return {name: value for name, value in fields.items() if value is not None}


# ---------------------------------------------------------------------- a request for text


class StreamOptions(Fields):
    """Options that say when a stream reports its usage. A JSON answer always has it."""

    places: ClassVar[tuple[str, ...]] = ("stream_options",)

    include_usage: bool | None = False
    """a last `usage` event with empty `choices` and the usage of all choices"""
    continuous_usage_stats: bool | None = False
    """every `token` event carries its choice's usage so far"""


class GenerationRequest(Body):
    """A request for text: a model, how to sample, when to end, and the form of the answer."""

    adds_special_tokens_by_default: ClassVar[bool]
    has_parts: ClassVar[bool] = False  # thoughts and tool calls are kept apart from the answer's text
    cuts_max_tokens: ClassVar[bool] = False  # more new tokens than fit behind the prompt are no error

    model: str | None = None
    """a name of the served model, as `/v1/models` gives it; default: that model"""
    # If one of these five is null, the model's own default applies: `Engine.default_params`.
    temperature: float | None = Field(default=None, ge=0.0)
    """0 is greedy; default: the model's, or 1"""
    top_p: float | None = Field(default=None, ge=0.0, le=1.0)
    """keep the likeliest tokens until their probabilities add up to this; 0 is greedy; default: the model's, or
    1"""
    top_k: Whole | None = Field(default=None, ge=-1, lt=2**31)
    """keep so many of the likeliest tokens; 0 and -1: all; default: the model's, or all"""
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    """keep tokens with at least this share of the likeliest token's probability; default: the model's, or 0"""
    repetition_penalty: float | None = Field(default=None, gt=0.0)
    """logits of tokens in prompt or answer are divided by this if positive, else multiplied; default: the model's,
    or 1"""
    presence_penalty: float | None = Field(default=0.0, ge=-2.0, le=2.0)
    """subtracted from the logits of tokens in the answer so far"""
    frequency_penalty: float | None = Field(default=0.0, ge=-2.0, le=2.0)
    """subtracted from a token's logit once for each time that the answer has it so far"""
    stop: Stop | None = None
    """at most 64 strings, left out of the text; empty ones are not looked for"""
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=256, fail_fast=True)
    """tokens that end the answer, like EOS"""
    seed: Whole | None = Field(default=None, ge=-(2**63), lt=2**63)
    """choice j of a prompt uses seed + j; -1: a random seed"""
    stream: bool | None = None
    """default: JSON if Accept asks for application/json, else a stream; under `/openai/`, false"""
    stream_options: StreamOptions | None = None
    """what a stream reports besides text"""
    n: Whole | None = Field(default=1, ge=1, le=16)
    """choices for each prompt"""
    ignore_eos: bool | None = False
    """go on to max_tokens"""
    min_tokens: Whole | None = Field(default=0, ge=0)
    """before so many tokens, no EOS, stop token or stop string ends the answer"""
    truncate_prompt_tokens: Whole | None = Field(default=None, ge=-1, json_schema_extra={"not": {"const": 0}})
    """a longer prompt is cut to so many tokens; -1: to as many as fit before `max_tokens`"""
    truncation_side: Literal["left", "right"] | None = "left"
    """the side at which a prompt that is too long is cut: `left` keeps the last tokens"""
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    """cached blocks are shared only with requests that have the same salt"""
    response_format: ResponseFormat | None = None
    """JSON answers"""
    structured_outputs: StructuredOutputs | None = None
    """the form of the answer; not together with `response_format`"""
    add_special_tokens: bool | None = None
    """whether a prompt of text gets the tokenizer's special tokens; default: true for completions, false for chat,
    whose template writes its own"""
    priority: Whole | None = Field(default=0, ge=-(2**31), lt=2**31)
    """requests with a lower number go first, then those that arrived first; phase 4 takes only 0"""
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, fail_fast=True)] | None = None
    """only these tokens are sampled; without EOS among them, EOS is not sampled either"""
    bad_words: list[BadWord] | None = Field(default=None, max_length=256, fail_fast=True)
    """words that no token may complete"""
    include_stop_str_in_output: bool | None = False
    """the text ends with the stop string, instead of before it"""
    skip_special_tokens: bool | None = True
    """special tokens are left out of the text"""
    echo: bool | None = False
    """the text begins with the prompt, and its log-probabilities are included if asked for; in a chat, it begins
    with the last message if that is an assistant's"""
    prompt_logprobs: Whole | None = Field(default=None, ge=0, le=20)
    """log-probabilities of the prompt's tokens after the first, and of so many likeliest tokens in each place"""
    return_token_ids: bool | None = False
    """the token ids of prompt and answer are returned, too"""
    # Labels do not change how a request is served: this server has no accounts that they could belong to.
    user: str | None = Field(default=None, max_length=256)
    """a label, which is written to the server's log"""
    safety_identifier: str | None = None
    """a label"""
    prompt_cache_key: str | None = None
    """a label"""
    metadata: dict[str, Any] | None = None
    """labels, by name"""
    logit_bias: dict[str, Any] | None = Field(
        default=None,
        max_length=1024,
        json_schema_extra={"additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
    )
    """a map from token ids to numbers from -100 to 100, which are added to their logits first"""

    # ------------------------------------------------------------------ different for each body

    @property
    def num_prompts(self) -> int:
        raise NotImplementedError

    def prompts(self, dialect: Dialect) -> Sequence[str] | Sequence[Sequence[int]]:
        """Return the prompts to continue, as texts or lists of token ids.

        Raises:
            InvalidRequestError: the dialect's chat template cannot render a conversation.
        """
        raise NotImplementedError

    @property
    def max_new_tokens(self) -> int | None:
        """The largest number of new tokens; None: `default_new_tokens`."""
        raise NotImplementedError

    @property
    def default_new_tokens(self) -> int | None:
        """The largest number of new tokens of a body that names none; None: as many as fit."""
        return None

    @property
    def reported_logprobs(self) -> int | None:
        """The number of most likely tokens to report with each sampled token; None: no log-probabilities."""
        return None

    @property
    def scored_prompt(self) -> int | None:
        """The number of most likely tokens to report with each prompt token; None: the prompt is not scored."""
        return self.prompt_logprobs

    @property
    def shown(self) -> Shown:
        return Shown(
            echo=bool(self.echo),
            prompt_logprobs=self.prompt_logprobs,
            token_ids=bool(self.return_token_ids),
        )

    def echo_of(self, number: int) -> str | None:
        """Return the text to echo for prompt `number`. None: the caller decodes the prompt's tokens instead."""
        raise NotImplementedError

    @property
    def predicted_text(self) -> str:
        """The text that the client expects in the answer; empty if the request names none."""
        return ""

    def field_of(self, param: str) -> str:
        """Return this body's name for a field, given the engine's name of it (`prompt` or `max_tokens`, say)."""
        return param

    @property
    def tool_use(self) -> ToolUse | None:
        """The tools that the answer may call; None: it may call none."""
        return None

    # ------------------------------------------------------------------ the same for all bodies

    @property
    def adds_special_tokens(self) -> bool:
        """True if the tokenizer adds its special tokens, such as BOS, to a prompt that is text."""
        given = self.add_special_tokens
        return self.adds_special_tokens_by_default if given is None else given

    @property
    def choices_per_prompt(self) -> int:
        return 1 if self.n is None else self.n

    def truncated(self, token_ids: Sequence[int], max_request_tokens: int) -> Sequence[int]:
        """Return a prompt's token ids, cut as `kept_prompt_tokens` and `truncation_side` say.

        `max_request_tokens` is the engine's bound on prompt and new tokens together.
        """
        count = self.kept_prompt_tokens
        if count is None:
            return token_ids
        if count == -1:
            new_tokens = self.max_new_tokens or max(self.default_new_tokens or 1, self.min_tokens or 0)
            least = max_request_tokens // 2 if self.cuts_max_tokens else 1
            count = max(least, max_request_tokens - new_tokens)
        return token_ids[:count] if self.truncation_side == "right" else token_ids[-count:]

    @property
    def kept_prompt_tokens(self) -> int | None:
        """A longer prompt is cut to so many tokens; -1: to as many as fit before the new ones; None: it is not."""
        return self.truncate_prompt_tokens

    @property
    def stop_strings(self) -> tuple[str, ...]:
        stop: Any = self.stop
        return tuple(filter(None, (stop,) if isinstance(stop, str) else stop or ()))

    @cached_property
    def named_grammar(self) -> tuple[str, Grammar] | None:
        """The path of the field that restricts an answer without tool calls, and its grammar; None: any text."""
        if self.response_format is not None and (grammar := self.response_format.named_grammar):
            return grammar
        return None if self.structured_outputs is None else self.structured_outputs.named_grammar

    @cached_property
    def _allowed_token_ids(self) -> tuple[int, ...] | None:
        """The token ids that may be sampled; None: all. All choices share this object, since it may be large."""
        return None if self.allowed_token_ids is None else tuple(self.allowed_token_ids)

    def sampling_params(self, choice: int, max_new_tokens: int, defaults: SamplingParams) -> SamplingParams:
        """Return the engine's sampling parameters for the choice with index `choice` of each prompt.

        The grammar and the values of fields that are null come from `defaults`. So does `skip_special_tokens`
        unless it is false: the server may need special tokens to find thoughts and calls.
        """
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "seed": None if self.seed in (None, -1) else self.seed + choice,
            "logprobs": self.reported_logprobs,
            "prompt_logprobs": self.scored_prompt if choice == 0 else None,  # the other choices show the same
            "allowed_token_ids": self._allowed_token_ids,
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "skip_special_tokens": False if self.skip_special_tokens is False else None,
            "ignore_eos": self.ignore_eos,
            "min_tokens": self.min_tokens,
        }
        values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if self.top_k in (0, -1):
            values["top_k"] = None
        if self.top_p == 0:
            values |= {"temperature": 0.0, "top_p": 1.0}
        return dataclasses.replace(
            defaults,
            **values,
            max_new_tokens=max_new_tokens,
            stop=self.stop_strings,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            bad_words=tuple(self.bad_words or ()),
            logit_bias=tuple(
                (int(token_id), float(bias)) for token_id, bias in (self.logit_bias or {}).items()
            ),
        )

    def check(self, limits: Limits) -> None:
        check_model(self.model or None, limits)
        self._check_fields()
        self._check_form()
        if self.max_new_tokens is not None and (self.min_tokens or 0) > self.max_new_tokens:
            raise refused("min_tokens", f"{self.min_tokens} is more than max_tokens, {self.max_new_tokens}")
        choices = self.num_prompts * self.choices_per_prompt
        if choices > limits.max_choices:
            raise refused(
                "prompt" if self.choices_per_prompt == 1 else "n",
                f"{choices} choices in one request are more than this server takes, {limits.max_choices} "
                "(its option --max-waiting-requests)",
            )

    def _check_fields(self) -> None:
        """Raise ApiError (422) for values that a field's type cannot rule out."""
        if self.truncate_prompt_tokens == 0:
            raise refused("truncate_prompt_tokens", "0 leaves nothing of a prompt; send at least 1, or -1")
        for token_id, bias in (self.logit_bias or {}).items():
            if not (token_id.isdecimal() and token_id.isascii() and len(token_id) < 10):
                raise refused("logit_bias", f"{token_id[:20]!r} is no token id")
            if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
                raise refused("logit_bias", f"the bias of token {token_id} must be a number from -100 to 100")

    def _check_form(self) -> None:
        """Raise ApiError (422) if fields for the form of the answer are incomplete or contradict each other."""
        if self.structured_outputs is None:
            self.structured_outputs = self._form_of_others()
        wanted, form = self.response_format, self.structured_outputs
        if wanted is not None:
            wanted.check()
        if form is not None:
            if wanted is not None and wanted.type != "text":
                raise refused(
                    "structured_outputs", "response_format says already what answers look like; send one"
                )
            form.check()

    def _form_of_others(self) -> StructuredOutputs | None:
        """Return what fields of `OTHER_FORMS` ask for; None: nothing. Raises ApiError (422) for a wrong type."""
        extra = self.model_extra or {}
        names = [name for name in OTHER_FORMS if extra.get(name) not in (None, "", {})]
        try:
            form = StructuredOutputs.model_validate({OTHER_FORMS[name]: extra[name] for name in names})
        except ValidationError as error:
            raise refused(names[0], error.errors()[0]["msg"]) from None
        return form if names else None
