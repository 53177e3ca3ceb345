"""OpenAI's `text_completion` objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.request import StepOutput, TokenLogprobs
from common.server.wire.format import (
    OPENAI_FINISH_REASONS,
    Answer,
    Choice,
    engine_reason,
    finite,
    joined_text,
)
from common.text import Tokenizer

KIND = "text_completion"


def completion(answer: Answer, said: Sequence[Sequence[StepOutput]]) -> dict[str, Any]:
    """The JSON answer."""
    return answer.header(KIND) | {
        "choices": [
            choice_object(
                choice,
                text=joined_text(outputs),
                logprobs=logprobs_object(answer.tokenizer, outputs),
                finish_reason=OPENAI_FINISH_REASONS[engine_reason(outputs)],
            )
            for choice, outputs in zip(answer.choices, said, strict=True)
        ],
        "usage": answer.usage(),
    }


def choice_object(
    choice: Choice,
    *,
    text: str = "",
    logprobs: dict[str, list[Any]] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def logprobs_object(
    tokenizer: Tokenizer, said: Sequence[StepOutput], *, offset: int = 0
) -> dict[str, list[Any]] | None:
    """What is known of the tokens of some outputs; None if it was not asked for.

    Args:
        tokenizer: of the model.
        said: outputs of one choice, in order.
        offset: characters of the choice's text before them.
    """
    tokens: list[str] = []
    token_logprobs: list[float] = []
    top_logprobs: list[dict[str, float]] = []
    text_offset: list[int] = []
    for output in said:
        if output.logprobs is not None and output.token_id is not None:
            tokens.append(tokenizer.token_text(output.token_id))
            token_logprobs.append(finite(output.logprobs.logprob))
            top_logprobs.append(_top(tokenizer, output.token_id, output.logprobs))
            text_offset.append(offset)
        offset += len(output.text_delta)
    if not tokens:
        return None
    return {
        "tokens": tokens,
        "token_logprobs": token_logprobs,
        "top_logprobs": top_logprobs,
        "text_offset": text_offset,
    }


def _top(tokenizer: Tokenizer, sampled: int, logprobs: TokenLogprobs) -> dict[str, float]:
    """Most likely first, and the sampled token if it is not among them. Of tokens that read the same (parts of
    characters do), the likeliest is kept."""
    top: dict[str, float] = {}
    for token_id, logprob in (*logprobs.top, (sampled, logprobs.logprob)):
        top.setdefault(tokenizer.token_text(token_id), finite(logprob))
    return top
