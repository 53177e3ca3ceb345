"""Base classes and functions of the wire formats of completions and chat. This is how their streams look.

The named events of `/v1/completions` have OpenAI chunks as `data`, except `error`. There is no `[DONE]`: every
`data` is a JSON object, and the stream ends with the HTTP response.

```text
event: token         one for each token of the answer
data: {…}

event: done          or error: one for each choice, its last
data: {…}

event: usage         only with stream_options.include_usage: all choices together
data: {…}
```

OpenAI's own streams, which strict tools want, are unnamed chunks. A choice that fails ends with
`data: {"error": {…}}`, which names the choice in `choices` if there are several.

```text
data: {… "delta": {"role": "assistant", "content": ""} …}      chat only: first of each choice
data: {…}            one for each sampled token. In a chat with tools or thoughts, a token may have no chunk (its
                     text comes with a later one) or several. A finish_reason is in a choice's last chunk
data: {…}            only with stream_options.include_usage: no choices, and the usage of all choices together
data: [DONE]
```
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from common.request import FinishReason, StepOutput
from common.server.api.answer import Answer, Choice, Prompt, WireFormat
from common.server.api.logprobs import prompt_logprobs
from common.server.api.shapes import (
    AnswerTokens,
    ChatCompletionChunk,
    CompletionChunk,
    ErrorEvent,
    OpenAIReason,
    PromptTokens,
    Usage,
    event,
)
from common.server.api.wanted import GenerationRequest, StreamOptions
from common.server.errors import from_exception

ChoiceT = TypeVar("ChoiceT")

DONE = b"data: [DONE]\n\n"

#: OpenAI's `finish_reason` for each finish reason of the engine.
OPENAI_FINISH_REASONS: dict[FinishReason, OpenAIReason] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "cancelled": "stop",
}


class Chunks(WireFormat):
    """Base class of the wire formats whose chunks may have a `usage` (token counts).

    Args:
        answer: the answer.
        wanted: the answer's request, whose `stream_options` say which chunks have a usage.
    """

    def __init__(self, answer: Answer, wanted: GenerationRequest) -> None:
        super().__init__(answer)
        options = wanted.stream_options or StreamOptions()
        self.include_usage = bool(options.include_usage)
        self.continuous_usage = bool(options.continuous_usage_stats)


class PlainChunks(Chunks, Generic[ChoiceT]):
    """Base class of OpenAI's own streams, for completions and for chat: unnamed chunks, then `[DONE]`."""

    last = DONE

    @abstractmethod
    def choices(self, choice: Choice, output: StepOutput) -> Iterator[ChoiceT]:
        """Yield one choice object for each chunk that an output needs."""

    @abstractmethod
    def chunk(self, choices: list[ChoiceT]) -> CompletionChunk | ChatCompletionChunk:
        """Return a chunk with these choice objects."""

    @abstractmethod
    def empty_choice(self, choice: Choice) -> Mapping[str, object]:
        """Return a choice object without text."""

    def events(self, choice: Choice, output: StepOutput) -> bytes:
        if output.error is not None:
            return event(error_event(self.answer, output, self.empty_choice(choice)))
        parts = list(self.choices(choice, output))
        chunks = [self.chunk([part]) for part in parts]
        if self.include_usage:  # then every chunk has the key, with null unless usage is continuous
            for part, chunk in zip(parts, chunks, strict=True):
                chunk["usage"] = self.usage(choice, part) if self.continuous_usage else None
        return b"".join(map(event, chunks))

    def usage(self, choice: Choice, part: ChoiceT) -> Usage:  # noqa: ARG002 - of chat, whose first has no token
        """Return the token counts of a choice up to and including the choice object `part`."""
        return choice.usage()

    def closing(self) -> bytes:
        if not self.include_usage:
            return DONE
        chunk = self.chunk([])
        chunk["usage"] = self.answer.usage()
        return event(chunk) + DONE


# ---------------------------------------------------------------------- fields of all formats


def error_event(answer: Answer, output: StepOutput, empty_choice: Mapping[str, object]) -> ErrorEvent:
    """Return the `data` of the event that ends a choice which failed.

    Args:
        answer: the choice's answer.
        output: the choice's last output.
        empty_choice: the choice without text, which names the failed choice if the answer has several.
    """
    assert output.error is not None, "an output that finishes has a reason or an error"
    data: ErrorEvent = {"error": from_exception(output.error).body()["error"]}
    if len(answer.choices) > 1:
        data["choices"] = [empty_choice]
    return data


def answer_tokens(answer: Answer, said: Sequence[StepOutput]) -> AnswerTokens:
    """Return the field `token_ids` of a choice with these outputs; no field if the request did not ask for it."""
    return {"token_ids": token_ids(said)} if answer.shown.token_ids else {}


def token_ids(said: Sequence[StepOutput]) -> list[int]:
    return [output.token_id for output in said if output.token_id is not None]


def show_prompt(fields: PromptTokens, answer: Answer, prompt: Prompt) -> None:
    """Add the token ids and log-probabilities of a prompt to an object, as far as the request asked for them."""
    if answer.shown.token_ids:
        fields["prompt_token_ids"] = list(prompt.token_ids)
    if answer.shown.prompt_logprobs is not None:
        fields["prompt_logprobs"] = prompt_logprobs(answer.tokenizer, prompt, answer.shown.prompt_logprobs)


def joined_text(said: Sequence[StepOutput]) -> str:
    """Return the joined text of a choice's outputs."""
    return "".join(output.text_delta for output in said)


def engine_reason(said: Sequence[StepOutput]) -> FinishReason:
    """Return the engine's finish reason of a choice that did not fail."""
    reason = said[-1].finish_reason
    assert reason is not None, "a choice that did not fail has a reason"
    return reason
