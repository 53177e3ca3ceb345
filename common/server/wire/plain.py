"""OpenAI's own streams, which strict tools want: unnamed chunks, and `[DONE]`.

```text
data: {…}            one for each sampled token; the one with a finish_reason has a choice's last text
data: {…}            only with stream_options.include_usage: no choices, and the usage of all together
data: [DONE]
```

A choice that fails ends with `data: {"error": {…}}`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from common.request import StepOutput
from common.server.wire.completion import KIND, choice_object, completion, logprobs_object, more
from common.server.wire.format import OPENAI_FINISH_REASONS, Answer, Choice, error_body, event

DONE = b"data: [DONE]\n\n"


class PlainChunks(ABC):
    """What is the same for text and for chat: see the module's docstring."""

    kind: ClassVar[str]  # OpenAI's name for a chunk

    def __init__(self, answer: Answer, *, include_usage: bool, continuous_usage: bool) -> None:
        self.answer = answer
        self.include_usage = include_usage
        self.continuous_usage = include_usage and continuous_usage
        self._header = answer.header(self.kind)

    @abstractmethod
    def choice_objects(self, choice: Choice, output: StepOutput) -> Iterator[dict[str, Any]]:
        """What one step says of one choice: a chunk for each."""

    @abstractmethod
    def whole(self, said: Sequence[Sequence[StepOutput]]) -> dict[str, Any]:
        """The JSON answer."""

    def events(self, choice: Choice, output: StepOutput) -> bytes:
        if output.error is not None:
            return event(error_body(output))
        usage: dict[str, Any] = {}
        if self.include_usage:  # OpenAI's chunks have the key then, and null for what the last one says
            usage["usage"] = choice.usage() if self.continuous_usage else None
        chunks = (self._header | {"choices": [each]} | usage for each in self.choice_objects(choice, output))
        return b"".join(map(event, chunks))

    def closing(self) -> bytes:
        if not self.include_usage:
            return DONE
        return event(self._header | {"choices": [], "usage": self.answer.usage()}) + DONE


class CompletionChunks(PlainChunks):
    """The wire format of `/openai/v1/completions`."""

    kind = KIND

    def choice_objects(self, choice: Choice, output: StepOutput) -> Iterator[dict[str, Any]]:
        text = choice.leading(output) + output.text_delta
        yield choice_object(
            choice,
            text=text,
            logprobs=logprobs_object(self.answer, choice, [output], offset=choice.text_length - len(text)),
            finish_reason=output.finish_reason and OPENAI_FINISH_REASONS[output.finish_reason],
        ) | more(self.answer, choice, [output])

    def whole(self, said: Sequence[Sequence[StepOutput]]) -> dict[str, Any]:
        return completion(self.answer, said)
