"""What a wire format is given and must do, and the objects that OpenAI's formats have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import orjson

from common.request import FinishReason, StepOutput, TokenLogprobs
from common.server.errors import from_exception
from common.server.requests.generation import Shown
from common.text import Tokenizer

LOWEST_LOGPROB = -9999.0  # JSON has no infinity

#: OpenAI's word for each of the engine's reasons.
OPENAI_FINISH_REASONS: dict[FinishReason, Literal["stop", "length"]] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "cancelled": "stop",
}


@dataclass(slots=True)
class Prompt:
    """One prompt of a request, and what its choices show of it.

    Attributes:
        token_ids: the prompt, once it has been tokenized.
        echo: the text that its choices begin with; empty unless the request asks for it.
        is_scored: whether the engine is done with scoring it.
        scores: log-probabilities of its tokens from the second on; None where none were asked for or it failed.
    """

    token_ids: Sequence[int] = ()
    echo: str = ""
    is_scored: bool = False
    scores: Sequence[TokenLogprobs] | None = None
    # Made from the scores, once for all choices: the field `prompt_logprobs`, and an echo's log-probabilities.
    logprobs_json: bytes | None = None
    echoed_logprobs: Any = None


@dataclass(slots=True)
class Choice:
    """One choice of an answer as it grows.

    Attributes:
        index: prompt × n + j.
        prompt: the prompt it continues, shared with its other choices.
        scores_prompt: whether this choice's request has the prompt scored; one choice of each prompt does.
        ended: whether its last event has been made.
    """

    index: int
    prompt: Prompt
    scores_prompt: bool
    text_length: int = 0  # characters so far
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    ended: bool = False

    def add(self, output: StepOutput) -> None:
        self.text_length += len(self.leading(output)) + len(output.text_delta)
        self.prompt_tokens, self.completion_tokens = output.prompt_tokens, output.completion_tokens
        self.cached_tokens = output.cached_tokens

    def leading(self, output: StepOutput) -> str:
        """Return the text before an output's own: the echo, before the first output."""
        return self.prompt.echo if is_first(output) else ""

    def usage(self) -> dict[str, Any]:
        return _usage(self.prompt_tokens, self.completion_tokens, self.cached_tokens)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the parts of one answer have in common."""

    id: str
    created: int  # seconds since 1970
    model: str
    tokenizer: Tokenizer
    choices: Sequence[Choice]
    shown: Shown = dataclasses.field(default_factory=Shown)

    def header(self, kind: str) -> dict[str, Any]:
        """The fields that every object of an answer begins with; `kind` is OpenAI's name for it."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def add(self, choice: Choice, output: StepOutput) -> StepOutput:
        """Count a choice's output and return it as the client gets it."""
        if self.shown.prompt_only and output.token_id is not None:
            output = without_token(output)
        choice.add(output)
        return output

    def usage(self) -> dict[str, Any]:
        """Sum up all choices. A prompt counts once, as its first choice found it, however many continue it."""
        first = {id(choice.prompt): choice for choice in reversed(self.choices)}.values()
        return _usage(
            sum(choice.prompt_tokens for choice in first),
            sum(choice.completion_tokens for choice in self.choices),
            sum(choice.cached_tokens for choice in first),
        )


def _usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class WireFormat(Protocol):
    """One answer, written one way or the other.

    Attributes:
        last: the bytes that every stream of this format ends with, whatever its choices ended with.
    """

    last: bytes

    def events(self, choice: Choice, output: StepOutput) -> bytes:
        """What one step has to say of one choice, which has it already."""
        ...

    def closing(self) -> bytes:
        """What follows after every choice's last output."""
        ...

    def whole(self, said: Sequence[Sequence[StepOutput]]) -> dict[str, Any]:
        """The JSON answer, from all outputs of every choice."""
        ...


class MakeWireFormat(Protocol):
    """What a route knows of a wire format: how to make one."""

    def __call__(self, answer: Answer, *, include_usage: bool, continuous_usage: bool) -> WireFormat: ...


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """One server-sent event. JSON has no raw line ends, so `data` is always one line."""
    line = b"data: %b\n\n" % orjson.dumps(data)
    return line if name is None else b"event: %b\n%b" % (name.encode(), line)


def error_data(answer: Answer, output: StepOutput, empty_choice: dict[str, Any]) -> dict[str, Any]:
    """Return the object that ends a choice which failed.

    Args:
        answer: the choice's.
        output: the choice's last.
        empty_choice: the choice without text, which says whose error it is if the answer has several choices.
    """
    assert output.error is not None, "an output that finishes has a reason or an error"
    data = from_exception(output.error).body()
    return data | {"choices": [empty_choice]} if len(answer.choices) > 1 else data


def without_token(output: StepOutput) -> StepOutput:
    """Return the only output of an answer without tokens, which lacks the one token that the engine sampled."""
    return dataclasses.replace(
        output, token_id=None, text_delta="", finish_reason="length", completion_tokens=0, logprobs=None
    )


def is_first(output: StepOutput) -> bool:
    """True if an output has a choice's first token, or ends an answer without tokens (see `without_token`)."""
    ends_without_tokens = output.completion_tokens == 0 and output.finish_reason == "length"
    return ends_without_tokens or (output.completion_tokens == 1 and output.token_id is not None)


def joined_text(said: Sequence[StepOutput]) -> str:
    return "".join(output.text_delta for output in said)


def engine_reason(said: Sequence[StepOutput]) -> FinishReason:
    """Why a choice ended that did not fail."""
    reason = said[-1].finish_reason
    assert reason is not None, "a choice that did not fail has a reason"
    return reason


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
