"""OpenAI's chat: the objects of an answer, and its stream.

```text
data: {… "delta": {"role": "assistant", "content": ""} …}      first of each choice
data: {… "delta": {"content": "…"} …}                          one for each sampled token, as in `plain`
data: [DONE]
```
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from common.request import StepOutput
from common.server.wire.format import (
    OPENAI_FINISH_REASONS,
    Answer,
    Choice,
    engine_reason,
    finite,
    joined_text,
)
from common.server.wire.plain import PlainChunks
from common.text import REPLACEMENT, Tokenizer


class ChatChunks(PlainChunks):
    """The wire format of chat."""

    kind = "chat.completion.chunk"

    def __init__(self, answer: Answer, *, include_usage: bool, continuous_usage: bool) -> None:
        super().__init__(answer, include_usage=include_usage, continuous_usage=continuous_usage)
        self._begun: set[int] = set()  # choices whose role has been said

    def choice_objects(self, choice: Choice, output: StepOutput) -> Iterator[dict[str, Any]]:
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            yield _chunk(choice, {"role": "assistant", "content": ""})
        yield _chunk(
            choice,
            {"content": output.text_delta},
            logprobs=logprobs_object(self.answer.tokenizer, [output]),
            finish_reason=output.finish_reason and OPENAI_FINISH_REASONS[output.finish_reason],
        )

    def empty_choice(self, choice: Choice) -> dict[str, Any]:
        return _chunk(choice, {})

    def whole(self, said: Sequence[Sequence[StepOutput]]) -> dict[str, Any]:
        return self.answer.header("chat.completion") | {
            "choices": [
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": joined_text(outputs), "refusal": None},
                    "logprobs": logprobs_object(self.answer.tokenizer, outputs),
                    "finish_reason": OPENAI_FINISH_REASONS[engine_reason(outputs)],
                }
                for choice, outputs in zip(self.answer.choices, said, strict=True)
            ],
            "usage": self.answer.usage(),
        }


def _chunk(
    choice: Choice,
    delta: dict[str, Any],
    *,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def logprobs_object(tokenizer: Tokenizer, said: Sequence[StepOutput]) -> dict[str, Any] | None:
    """What is known of the tokens of some outputs; None if it was not asked for."""
    content = [
        _token_object(tokenizer, output.token_id, output.logprobs.logprob)
        | {"top_logprobs": [_token_object(tokenizer, *each) for each in output.logprobs.top]}
        for output in said
        if output.logprobs is not None and output.token_id is not None
    ]
    return {"content": content, "refusal": None} if content else None


def _token_object(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    text = tokenizer.token_text(token_id)
    # Part of a character reads as U+FFFD, whose bytes would be others than the token's.
    raw = None if REPLACEMENT in text else list(text.encode())
    return {"token": text, "logprob": finite(logprob), "bytes": raw}
