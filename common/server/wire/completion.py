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
    is_first,
    joined_text,
)
from common.text import IncrementalDetokenizer, Tokenizer

KIND = "text_completion"


def completion(answer: Answer, said: Sequence[Sequence[StepOutput]]) -> dict[str, Any]:
    """The JSON answer."""
    return answer.header(KIND) | {
        "choices": [
            choice_object(
                choice,
                text=choice.echo + joined_text(outputs),
                logprobs=logprobs_object(answer, choice, outputs),
                finish_reason=OPENAI_FINISH_REASONS[engine_reason(outputs)],
            )
            | more(answer, choice, outputs)
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


def more(answer: Answer, choice: Choice, said: Sequence[StepOutput]) -> dict[str, Any]:
    """What vLLM's fields ask a choice for, of these outputs; of the prompt, with the first of them."""
    shown = answer.shown
    first = bool(said) and is_first(said[0])
    fields: dict[str, Any] = {}
    if shown.token_ids:
        fields["token_ids"] = [output.token_id for output in said if output.token_id is not None]
        if first:
            fields["prompt_token_ids"] = list(choice.prompt_ids)
    if shown.prompt_logprobs is not None and first:
        fields["prompt_logprobs"] = _prompt_logprobs(answer.tokenizer, choice, said[0], shown.prompt_logprobs)
    return fields


def _prompt_logprobs(
    tokenizer: Tokenizer, choice: Choice, first: StepOutput, count: int
) -> list[dict[str, Any] | None]:
    """For each token of the prompt, by token id; nothing comes before the first."""
    entries: list[dict[str, Any] | None] = [None]
    for token_id, logprobs in zip(choice.prompt_ids[1:], first.prompt_logprobs or (), strict=True):
        named: dict[int, tuple[float, int | None]] = {
            each: (logprob, place) for place, (each, logprob) in enumerate(logprobs.top[:count], 1)
        }
        named.setdefault(token_id, (logprobs.logprob, logprobs.rank))
        entries.append(
            {
                str(each): {
                    "logprob": finite(logprob),
                    "rank": rank,
                    "decoded_token": tokenizer.token_text(each),
                }
                for each, (logprob, rank) in named.items()
            }
        )
    return entries


def logprobs_object(
    answer: Answer, choice: Choice, said: Sequence[StepOutput], *, offset: int = 0
) -> dict[str, list[Any]] | None:
    """What is known of the tokens of some outputs, and of an echoed prompt; None if it was not asked for.

    Args:
        answer: the choice's.
        choice: whose they are.
        said: outputs, in order.
        offset: characters of the choice's text before them.
    """
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []
    tokenizer = answer.tokenizer

    def add(token_id: int, logprobs: TokenLogprobs | None, at: int) -> None:
        tokens.append(tokenizer.token_text(token_id))
        token_logprobs.append(None if logprobs is None else finite(logprobs.logprob))
        top_logprobs.append(None if logprobs is None else _top(tokenizer, token_id, logprobs))
        text_offset.append(at)

    if said and is_first(said[0]) and answer.shown.echo and answer.shown.logprobs is not None:
        pieces = IncrementalDetokenizer(tokenizer, ())
        known = [None, *(_cut(each, answer.shown.logprobs) for each in said[0].prompt_logprobs or ())]
        at = offset
        for token_id, logprobs in zip(choice.prompt_ids, known, strict=True):
            add(token_id, logprobs, min(at, offset + len(choice.echo)))
            at += len(pieces.add(token_id))
        offset += len(choice.echo)
    for output in said:
        if output.logprobs is not None and output.token_id is not None:
            add(output.token_id, output.logprobs, offset)
        offset += len(output.text_delta)
    if not tokens:
        return None
    return {
        "tokens": tokens,
        "token_logprobs": token_logprobs,
        "top_logprobs": top_logprobs,
        "text_offset": text_offset,
    }


def _cut(logprobs: TokenLogprobs, count: int) -> TokenLogprobs:
    """Without more than was asked for, for another field, say."""
    return TokenLogprobs(logprobs.logprob, logprobs.top[:count])


def _top(tokenizer: Tokenizer, sampled: int, logprobs: TokenLogprobs) -> dict[str, float]:
    """Most likely first, and the sampled token if it is not among them. Of tokens that read the same (parts of
    characters do), the likeliest is kept."""
    top: dict[str, float] = {}
    for token_id, logprob in (*logprobs.top, (sampled, logprobs.logprob)):
        top.setdefault(tokenizer.token_text(token_id), finite(logprob))
    return top
