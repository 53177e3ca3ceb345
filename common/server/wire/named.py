"""Named events that are OpenAI chunks at the same time: the phases' own stream.

```text
event: token         one for each sampled token
data: {…}

event: done          or error: one for each choice, its last
data: {…}

event: usage         only with stream_options.include_usage: all choices together
data: {…}
```

There is no `[DONE]`: every `data` is a JSON object, and the stream's end says as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.request import StepOutput
from common.server.wire.completion import KIND, choice_object, chunk_object, completion
from common.server.wire.format import (
    OPENAI_FINISH_REASONS,
    Answer,
    Choice,
    engine_reason,
    error_data,
    event,
)


class NamedCompletionEvents:
    """The wire format of `/v1/completions`: see the module's docstring."""

    last = b""

    def __init__(self, answer: Answer, *, include_usage: bool, continuous_usage: bool) -> None:
        self.answer = answer
        self.include_usage = include_usage
        self.continuous_usage = continuous_usage
        self._header = answer.header(KIND)

    def events(self, choice: Choice, output: StepOutput) -> bytes:
        token = self._token(choice, output) if output.token_id is not None else b""
        return token + self._terminal(choice, output) if output.finished else token

    def closing(self) -> bytes:
        if not self.include_usage:
            return b""
        return event(self._header | {"choices": [], "usage": self.answer.usage()}, "usage")

    def whole(self, said: Sequence[Sequence[StepOutput]]) -> dict[str, Any]:
        return completion(self.answer, said) | {"finish_reason": engine_reason(said[0])}

    def _token(self, choice: Choice, output: StepOutput) -> bytes:
        data = self._header | {
            "choices": [chunk_object(self.answer, choice, output)],
            "token": output.text_delta,
            "token_id": output.token_id,
        }
        if self.continuous_usage:
            data["usage"] = choice.usage()
        return event(data, "token")

    def _terminal(self, choice: Choice, output: StepOutput) -> bytes:
        if output.finish_reason is None:
            return self._error(choice, output)
        reason = OPENAI_FINISH_REASONS[output.finish_reason]
        # An answer without tokens has no token event, so this one has the prompt.
        without_tokens = self.answer.shown.prompt_only
        told = chunk_object(self.answer, choice, output) if without_tokens else choice_object(choice)
        return event(
            self._header
            | {
                "choices": [told | {"finish_reason": reason}],
                "finish_reason": output.finish_reason,
                "usage": choice.usage(),
            },
            "done",
        )

    def _error(self, choice: Choice, output: StepOutput) -> bytes:
        return event(error_data(self.answer, output, choice_object(choice)), "error")
