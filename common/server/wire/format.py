"""What a wire format is given and must do, and the objects that OpenAI's formats have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import orjson

from common.request import FinishReason, StepOutput
from common.server.errors import from_exception
from common.text import Tokenizer

LOWEST_LOGPROB = -9999.0  # JSON has no infinity

#: OpenAI's word for each of the engine's reasons.
OPENAI_FINISH_REASONS: dict[FinishReason, Literal["stop", "length"]] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "cancelled": "stop",
}


@dataclass(frozen=True, slots=True)
class Shown:
    """What an answer says beside its text, if its format has a place for it.

    Attributes:
        echo: the prompt comes first.
        logprobs: how many of the most likely tokens are named beside an echoed one; None: no log-probabilities.
        prompt_logprobs: the same for a field of its own.
        token_ids: of prompt and answer.
    """

    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False


@dataclass(slots=True)
class Choice:
    """One choice of an answer as it grows.

    Attributes:
        index: prompt × n + j.
        prompt_index: which of the request's prompts it continues.
        prompt_ids: that prompt, once it has been tokenized.
        echo: what its text begins with.
    """

    index: int
    prompt_index: int
    prompt_ids: Sequence[int] = ()
    echo: str = ""
    text_length: int = 0  # characters so far
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, output: StepOutput) -> None:
        self.text_length += len(self.leading(output)) + len(output.text_delta)
        self.prompt_tokens, self.completion_tokens = output.prompt_tokens, output.completion_tokens
        self.cached_tokens = output.cached_tokens

    def leading(self, output: StepOutput) -> str:
        """What stands before an output's own text: the echo, before the first."""
        return self.echo if is_first(output) else ""

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
    shown: Shown = Shown()

    def header(self, kind: str) -> dict[str, Any]:
        """The fields that every object of an answer begins with; `kind` is OpenAI's name for it."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def usage(self) -> dict[str, Any]:
        """All choices together; a prompt counts once, as its first choice found it, however many continue it."""
        first = {choice.prompt_index: choice for choice in reversed(self.choices)}.values()
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
    """One answer, written one way or the other."""

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


def error_body(output: StepOutput) -> dict[str, Any]:
    """The object that ends a choice which failed."""
    assert output.error is not None, "an output that finishes has a reason or an error"
    return from_exception(output.error).body()


def is_first(output: StepOutput) -> bool:
    """Whether it brings a choice's first token."""
    return output.completion_tokens == 1 and output.token_id is not None


def joined_text(said: Sequence[StepOutput]) -> str:
    return "".join(output.text_delta for output in said)


def engine_reason(said: Sequence[StepOutput]) -> FinishReason:
    """Why a choice ended that did not fail."""
    reason = said[-1].finish_reason
    assert reason is not None, "a choice that did not fail has a reason"
    return reason


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
