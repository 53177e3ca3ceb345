"""The API's bodies: what `POST /v1/completions` takes, and what every route answers.

Rule: a field is implemented, or refused at any value but its neutral one. Nothing is accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError
from pydantic_core import ErrorDetails

from common.grammar import Grammar
from common.request import SamplingParams
from common.server.errors import ApiError, shorten
from common.telemetry import PAGE_STEPS

DEFAULT_MAX_TOKENS = 128
MAX_BODY_BYTES = 2 * 1024 * 1024

# ---------------------------------------------------------------------- prompt and stop: told apart at a glance

#: Which form a list has, by the type of its first item.
_LIST_FORMS: dict[type, str] = {
    int: "tokens",
    float: "tokens",
    bool: "tokens",
    str: "texts",
    list: "token_lists",
}
_STOP_FORMS: dict[type, str] = {str: "text", list: "texts"}
_SCHEMA_FORMS: dict[type, str] = {str: "text", dict: "object"}


def _prompt_form(prompt: Any) -> str | None:
    """The one form to validate a prompt as. Trying all of them would cost an error for each token and form."""
    if type(prompt) is str:
        return "text"
    if type(prompt) is not list:
        return None
    return _LIST_FORMS.get(type(prompt[0])) if prompt else "tokens"


def _stop_form(stop: Any) -> str | None:
    return _STOP_FORMS.get(type(stop))


def _schema_form(schema: Any) -> str | None:
    return _SCHEMA_FORMS.get(type(schema))


# fail_fast: the first bad item of a list is the only one reported, so two megabytes of them cost one error.
TokenId = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[Text], Field(min_length=1, fail_fast=True)]
TokenLists = Annotated[list[Tokens], Field(min_length=1, fail_fast=True)]
Prompt = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[Tokens, Tag("tokens")]
    | Annotated[Texts, Tag("texts")]
    | Annotated[TokenLists, Tag("token_lists")],
    Discriminator(
        _prompt_form,
        custom_error_type="prompt_type",
        custom_error_message="Input should be a string, a list of strings, a list of token ids, or a list of "
        "lists of token ids",
    ),
]

StopString = Annotated[str, Field(min_length=1, max_length=256)]
Stop = Annotated[
    Annotated[StopString, Tag("text")]
    | Annotated[list[StopString], Field(max_length=16, fail_fast=True), Tag("texts")],
    Discriminator(
        _stop_form,
        custom_error_type="stop_type",
        custom_error_message="Input should be a string or a list of strings",
    ),
]

JsonSchema = Annotated[
    Annotated[str, Tag("text")] | Annotated[dict[str, Any], Tag("object")],
    Discriminator(
        _schema_form,
        custom_error_type="schema_type",
        custom_error_message="Input should be an object, or the JSON text of one",
    ),
]

_TAGS = frozenset({"text", "texts", "tokens", "token_lists", "object"})

# ---------------------------------------------------------------------- the request

# Strict: "5" is not 5, and true is not 1. Unknown fields are refused by `_refuse_unknown`: pydantic's own refusal
# reports each of them, which takes seconds for two megabytes of them.
_BODY = ConfigDict(
    strict=True, allow_inf_nan=False, extra="allow", json_schema_extra={"additionalProperties": False}
)


class StreamOptions(BaseModel):
    """When a stream reports its usage. A JSON answer always has it, so both keys hold there as well."""

    model_config = _BODY

    include_usage: bool | None = Field(
        default=False, description="a last `usage` event with empty `choices` and the usage of all choices"
    )
    continuous_usage_stats: bool | None = Field(
        default=False, description="every `token` event carries its choice's usage so far"
    )


class JsonSchemaFormat(BaseModel):
    """OpenAI's envelope of a JSON Schema. `name` and `description` are labels: the model is not told of them."""

    model_config = _BODY

    name: str = Field(max_length=64)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema", description="a JSON Schema")
    strict: bool | None = Field(default=None, description="whatever it is, every answer follows the schema")


class ResponseFormat(BaseModel):
    """What OpenAI's clients ask for JSON by."""

    model_config = _BODY

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = Field(default=None, description="with type `json_schema`")


class StructuredOutputs(BaseModel):
    """What vLLM's clients ask for answers of a form by: exactly one of these."""

    model_config = _BODY

    json_: JsonSchema | None = Field(
        default=None, alias="json", description="a JSON Schema, or its JSON text"
    )
    regex: str | None = Field(
        default=None, description="in the syntax of Rust's regex; matches the whole answer"
    )
    choice: Annotated[list[Text], Field(min_length=1, fail_fast=True)] | None = Field(
        default=None, description="the answer is one of these"
    )
    grammar: str | None = Field(default=None, description="in Lark's notation or llama.cpp's (GBNF)")

    @property
    def given(self) -> dict[str, Any]:
        """Those that are not null."""
        fields = {"json": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        return {name: value for name, value in fields.items() if value is not None}


_GRAMMARS: dict[str, Callable[[Any], Grammar]] = {
    "json": Grammar.json_schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.context_free,
}


class CompletionRequest(BaseModel):
    """The body of `POST /v1/completions`. null means the default, for all but `model` and `prompt`."""

    model_config = _BODY

    model: str = Field(description="the served model's name, as `/v1/models` gives it")
    prompt: Prompt = Field(
        description="one prompt or several; text gets the tokenizer's special tokens, ids none"
    )
    max_tokens: int | None = Field(default=DEFAULT_MAX_TOKENS, ge=1)
    temperature: float | None = Field(default=1.0, ge=0.0, description="0 is greedy")
    top_p: float | None = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=1, lt=2**31)
    min_p: float | None = Field(default=0.0, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(default=1.0, gt=0.0)
    presence_penalty: float | None = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(default=0.0, ge=-2.0, le=2.0)
    stop: Stop | None = Field(default=None, description="at most 16 strings, left out of the text")
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=256, fail_fast=True)
    seed: int | None = Field(
        default=None, ge=-(2**63), lt=2**63, description="choice j of a prompt uses seed + j"
    )
    stream: bool | None = Field(
        default=None, description="default: JSON if Accept asks for application/json, else a stream"
    )
    stream_options: StreamOptions | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)
    n: int | None = Field(default=1, ge=1, le=16, description="choices for each prompt")
    ignore_eos: bool | None = Field(default=False, description="go on to max_tokens")
    min_tokens: int | None = Field(default=0, ge=0, description="no EOS and no stop token before so many")
    cache_salt: str | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="what is cached is shared only with requests that have the same one",
    )
    response_format: ResponseFormat | None = Field(default=None, description="JSON answers")
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="answers of a form; not together with `response_format`"
    )
    # A label that the request's log line carries: that is all a server without accounts can do with it.
    user: str | None = Field(default=None, max_length=256, description="a label for the server's log")
    # Not implemented: refused unless neutral (see `_refuse_unimplemented`).
    echo: bool | None = Field(
        default=False,
        description="only false: the prompt is not sent back",
        json_schema_extra={"enum": [False, None]},
    )
    best_of: int | None = Field(default=None, ge=1, description="only n: every choice is sent")
    suffix: str | None = Field(
        default=None, description="only null: text is not inserted", json_schema_extra={"enum": [None]}
    )
    logit_bias: dict[str, Any] | None = Field(
        default=None, description="only {}: tokens are not biased", json_schema_extra={"maxProperties": 0}
    )

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Every prompt, where one may stand alone."""
        prompt: Any = self.prompt
        return prompt if _prompt_form(prompt) in ("texts", "token_lists") else [prompt]

    @property
    def choices_per_prompt(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def stop_strings(self) -> tuple[str, ...]:
        stop: Any = self.stop
        return (stop,) if _stop_form(stop) == "text" else tuple(stop or ())

    @property
    def constrained(self) -> bool:
        """Whether it is said what the answer must look like."""
        by_format = self.response_format is not None and self.response_format.type != "text"
        return by_format or self.structured_outputs is not None

    @cached_property
    def named_grammar(self) -> tuple[str, Grammar] | None:
        """What the answer must look like, and the field that says so; None: like anything."""
        wanted, form = self.response_format, self.structured_outputs
        if wanted is not None and wanted.json_schema is not None:
            return "response_format.json_schema.schema", Grammar.json_schema(wanted.json_schema.schema_)
        if wanted is not None and wanted.type == "json_object":
            return "response_format", Grammar.json_object()
        if form is None:
            return None
        ((field, value),) = form.given.items()  # one: see `_check_form`
        return f"structured_outputs.{field}", _GRAMMARS[field](value)

    def sampling_params(self, choice: int) -> SamplingParams:
        """How choice `choice` of each prompt is sampled. Nulls become the defaults, which are the engine's too."""
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "max_new_tokens": self.max_tokens,
            "seed": None if self.seed is None else self.seed + choice,
            "logprobs": self.logprobs,
            "ignore_eos": self.ignore_eos,
            "min_tokens": self.min_tokens,
            "grammar": None if self.named_grammar is None else self.named_grammar[1],
        }
        values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(
            **values, stop=self.stop_strings, stop_token_ids=tuple(self.stop_token_ids or ())
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request can ask of this server."""

    model: str
    max_choices: int  # more would not fit an empty queue


def parse_completion_request(body: bytes, limits: Limits) -> CompletionRequest:
    """Read and check a request's body.

    Raises:
        ApiError: 400 for what is not JSON, lacks a field, or has one of a wrong type; 422 for what is well-formed
            and cannot be served.
    """
    try:
        request = CompletionRequest.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error) from None
    _refuse_unknown(request)
    if request.model != limits.model:
        raise ApiError(
            422,
            f"model {shorten(request.model, 100)!r} is not served here; this server has {limits.model!r}",
            param="model",
            code="model_not_found",
        )
    _refuse_unimplemented(request)
    _check_form(request)
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if (request.min_tokens or 0) > max_tokens:
        raise _refused("min_tokens", f"{request.min_tokens} is more than max_tokens, {max_tokens}")
    choices = len(request.prompts) * request.choices_per_prompt
    if choices > limits.max_choices:
        raise _refused(
            "prompt" if request.choices_per_prompt == 1 else "n",
            f"{choices} choices in one request are more than this server ever queues, {limits.max_choices} "
            "(its option --max-waiting-requests)",
        )
    return request


def _refuse_unknown(body: BaseModel, prefix: str = "") -> None:
    """Unknown fields of a body and of the objects in it."""
    unknown = next(iter(body.model_extra or ()), None)
    if unknown is not None:
        name = prefix + shorten(unknown, 100)
        raise ApiError(422, f"{name}: unknown field", param=name, code="unknown_field")
    for name in body.model_fields_set:
        value = getattr(body, name, None)
        if isinstance(value, BaseModel):
            _refuse_unknown(value, f"{prefix}{name}.")


def _refuse_unimplemented(request: CompletionRequest) -> None:
    if request.echo:
        raise _refused("echo", "not implemented; send false or leave it out")
    if request.suffix is not None:
        raise _refused("suffix", "not implemented; send null or leave it out")
    if request.logit_bias:
        raise _refused("logit_bias", "not implemented; send {} or leave it out")
    if request.best_of is not None and request.best_of != request.choices_per_prompt:
        raise _refused("best_of", "not implemented; send the value of n, or leave it out")


def _check_form(request: CompletionRequest) -> None:
    """At most one thing can say what an answer looks like."""
    wanted, form = request.response_format, request.structured_outputs
    if wanted is not None and (wanted.type == "json_schema") is not (wanted.json_schema is not None):
        raise _refused(
            "response_format", "json_schema and type 'json_schema' go together; send both or neither"
        )
    if form is None:
        return
    if wanted is not None and wanted.type != "text":
        raise _refused("structured_outputs", "response_format says already what answers look like; send one")
    if len(form.given) != 1:
        raise _refused(
            "structured_outputs", f"send one of json, regex, choice, grammar, not {len(form.given)}"
        )


def _refused(param: str, message: str) -> ApiError:
    return ApiError(422, f"{param}: {message}", param=param, code="invalid_value")


# ---------------------------------------------------------------------- what pydantic found, as an ApiError

_SYNTAX_ERRORS = frozenset({"json_invalid", "missing", "finite_number"})


def _explain(error: ValidationError) -> ApiError:
    """One answer for all that is wrong: the first syntax or type error, or else the first of any kind."""
    details = error.errors(include_url=False, include_input=False, include_context=False)
    worst = next((each for each in details if _is_syntax(each)), details[0])
    path = [part for part in worst["loc"] if part not in _TAGS]
    where = "".join(f"[{part}]" if type(part) is int else f".{shorten(str(part), 100)}" for part in path)
    where = where.removeprefix(".")
    kind, message = worst["type"], worst["msg"]
    return ApiError(
        400 if _is_syntax(worst) else 422,
        f"{where}: {message}" if where else message,
        param=str(path[0]) if path else None,
        code={"json_invalid": "invalid_json", "missing": "missing_field"}.get(
            kind, "invalid_type" if kind.endswith("_type") else "invalid_value"
        ),
    )


def _is_syntax(detail: ErrorDetails) -> bool:
    """Whether this is an error of form (400) rather than of value (422). An empty prompt, or a token id that no
    model has, counts as one of form."""
    kind = detail["type"]
    return kind in _SYNTAX_ERRORS or kind.endswith(("_type", "_parsing")) or detail["loc"][:1] == ("prompt",)


# ---------------------------------------------------------------------- answers, for the OpenAPI document


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(BaseModel):
    """Every error of every route."""

    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    cached_tokens: int = Field(description="found in memory and not computed; 0 in phases that share nothing")


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Logprobs(BaseModel):
    """One entry for each sampled token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int] = Field(description="characters of the choice's text that came before the token's")


class CompletionChoice(BaseModel):
    index: int = Field(description="prompt × n + j")
    text: str
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(BaseModel):
    """The JSON answer. A stream's events hold the same objects in pieces."""

    id: str
    object: Literal["text_completion"]
    created: int = Field(description="seconds since 1970")
    model: str
    choices: list[CompletionChoice]
    finish_reason: Literal["eos", "stop", "length", "cancelled"] = Field(
        description="the engine's reason of choice 0"
    )
    usage: Usage


class ChunkChoice(BaseModel):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionEvent(BaseModel):
    """The `data` of a `token`, `done` or `usage` event: an OpenAI chunk, and more."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[ChunkChoice] = Field(max_length=1, description="empty in a `usage` event")
    token: str | None = Field(default=None, description="`token`: the text that this token let out")
    token_id: int | None = Field(default=None, description="`token`")
    finish_reason: Literal["eos", "stop", "length", "cancelled"] | None = Field(
        default=None, description="`done`: the engine's reason"
    )
    usage: Usage | None = Field(default=None, description="`done`, `usage`, and `token` if asked for")


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int = Field(description="prompt and new tokens of one request at the most")
    phase: str


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    status: Literal["ok"]
    phase: str


class Version(BaseModel):
    version: str
    phase: str
    torch: str
    device: str
    dtype: str
    kernels: Literal["triton", "native", "torch"] = Field(
        description="what computes norms, attention and the like"
    )
    batch_invariant: bool = Field(
        description="whether a sequence's logits have the same bits alone and beside any others: measured at start "
        "with native kernels, false without"
    )


class CacheReset(BaseModel):
    dropped_blocks: int = Field(description="blocks of the prefix cache that nobody used")


class TelemetrySnapshot(BaseModel):
    """Counters since the start, and a page of the latest steps."""

    phase: str
    max_batch_size: int
    max_seq_len: int
    queue_room: int = Field(description="requests that would be taken before new ones are answered 503")
    counters: dict[str, float]
    steps: list[dict[str, float]] = Field(max_length=PAGE_STEPS)
    next_step: int = Field(
        description="`since_step` of the next page, which is there already if this is less than the steps counted"
    )
