"""OpenAI's own streams, which strict tools want: unnamed chunks, and `[DONE]`.

```text
data: {…}            one for each sampled token; the one with a finish_reason has a choice's last text
data: {…}            only with stream_options.include_usage: no choices, and the usage of all together
data: [DONE]
```

A choice that fails ends with `data: {"error": {…}}`, which says in `choices` whose it is if there are several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from common.request import StepOutput
from common.server.wire.completion import KIND, choice_object, chunk_object, completion
from common.server.wire.format import OPENAI_FINISH_REASONS, Answer, Choice, error_data, event

DONE = b"data: [DONE]\n\n"


class PlainChunks(ABC):
    """What is the same for text and for chat: see the module's docstring."""

    kind: ClassVar[str]  # OpenAI's name for a chunk
    last = DONE

    def __init__(self, answer: Answer, *, include_usage: bool, continuous_usage: bool) -> None:
        self.answer = answer
        self.include_usage = include_usage
        self.continuous_usage = include_usage and continuous_usage
        self._header = answer.header(self.kind)

    @abstractmethod
    def choice_objects(self, choice: Choice, output: StepOutput) -> Iterator[dict[str, Any]]:
        """What one step says of one choice: a chunk for each."""

    @abstractmethod
    def empty_choice(self, choice: Choice) -> dict[str, Any]:
        """Return a choice of a chunk without text."""

    @abstractmethod
    def whole(self, said: Sequence[Sequence[StepOutput]]) -> dict[str, Any]:
        """The JSON answer."""

    def events(self, choice: Choice, output: StepOutput) -> bytes:
        if output.error is not None:
            return event(error_data(self.answer, output, self.empty_choice(choice)))
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
        reason = output.finish_reason and OPENAI_FINISH_REASONS[output.finish_reason]
        yield chunk_object(self.answer, choice, output) | {"finish_reason": reason}

    def empty_choice(self, choice: Choice) -> dict[str, Any]:
        return choice_object(choice)

    def whole(self, said: Sequence[Sequence[StepOutput]]) -> dict[str, Any]:
        return completion(self.answer, said)
