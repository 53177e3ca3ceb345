"""OpenAI's `text_completion` objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson

from common.request import StepOutput, TokenLogprobs
from common.server.wire.format import (
    OPENAI_FINISH_REASONS,
    Answer,
    Choice,
    Prompt,
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
                text=choice.prompt.echo + joined_text(outputs),
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


def chunk_object(answer: Answer, choice: Choice, output: StepOutput) -> dict[str, Any]:
    """Return one output of a choice as a stream's chunk has it, without its `finish_reason`."""
    text = choice.leading(output) + output.text_delta
    logprobs = logprobs_object(answer, choice, [output], offset=choice.text_length - len(text))
    return choice_object(choice, text=text, logprobs=logprobs) | more(answer, choice, [output])


def more(answer: Answer, choice: Choice, said: Sequence[StepOutput]) -> dict[str, Any]:
    """Return vLLM's extension fields for these outputs. Fields about the prompt go with a choice's first output."""
    shown = answer.shown
    first = bool(said) and is_first(said[0])
    fields: dict[str, Any] = {}
    if shown.token_ids:
        fields["token_ids"] = [output.token_id for output in said if output.token_id is not None]
        if first:
            fields["prompt_token_ids"] = list(choice.prompt.token_ids)
    if shown.prompt_logprobs is not None and first:
        fields["prompt_logprobs"] = _prompt_logprobs(answer.tokenizer, choice.prompt, shown.prompt_logprobs)
    return fields


def _prompt_logprobs(tokenizer: Tokenizer, prompt: Prompt, count: int) -> orjson.Fragment | None:
    """Encode a prompt's log-probabilities, once for all its choices; None if it could not be scored."""
    if prompt.scores is None:
        return None
    if prompt.logprobs_json is None:
        entries = _prompt_logprob_entries(tokenizer, prompt.token_ids, prompt.scores, count)
        prompt.logprobs_json = orjson.dumps(entries)
    return orjson.Fragment(prompt.logprobs_json)


def _prompt_logprob_entries(
    tokenizer: Tokenizer, token_ids: Sequence[int], scores: Sequence[TokenLogprobs], count: int
) -> list[dict[str, Any] | None]:
    """Return an entry for each token of a prompt, by token id. The first has none: nothing comes before it."""
    entries: list[dict[str, Any] | None] = [None]
    for token_id, logprobs in zip(token_ids[1:], scores, strict=True):
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


class TokenColumns(NamedTuple):
    """OpenAI's form of log-probabilities: a list for each property of the tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    @classmethod
    def empty(cls) -> TokenColumns:
        return cls([], [], [], [])

    def add(self, tokenizer: Tokenizer, token_id: int, logprobs: TokenLogprobs | None, offset: int) -> None:
        self.tokens.append(tokenizer.token_text(token_id))
        self.token_logprobs.append(None if logprobs is None else finite(logprobs.logprob))
        self.top_logprobs.append(None if logprobs is None else _top(tokenizer, token_id, logprobs))
        self.text_offset.append(offset)

    def extend(self, other: TokenColumns) -> None:
        self.tokens.extend(other.tokens)
        self.token_logprobs.extend(other.token_logprobs)
        self.top_logprobs.extend(other.top_logprobs)
        self.text_offset.extend(other.text_offset)


def logprobs_object(
    answer: Answer, choice: Choice, said: Sequence[StepOutput], *, offset: int = 0
) -> dict[str, list[Any]] | None:
    """Return the log-probabilities of the tokens of some outputs, and of an echoed prompt; None if not asked for.

    Args:
        answer: the choice's.
        choice: whose outputs they are.
        said: outputs, in order.
        offset: characters of the choice's text before them.
    """
    columns = TokenColumns.empty()
    prompt, shown = choice.prompt, answer.shown
    if said and is_first(said[0]) and shown.echo and shown.logprobs is not None:
        if prompt.echoed_logprobs is None:
            prompt.echoed_logprobs = _echoed(answer.tokenizer, prompt, shown.logprobs)
        columns.extend(prompt.echoed_logprobs)
        offset += len(prompt.echo)
    for output in said:
        if output.logprobs is not None and output.token_id is not None:
            columns.add(answer.tokenizer, output.token_id, output.logprobs, offset)
        offset += len(output.text_delta)
    return columns._asdict() if columns.tokens else None


def _echoed(tokenizer: Tokenizer, prompt: Prompt, count: int) -> TokenColumns:
    """Return the log-probabilities of a prompt that stands at the beginning of its choices' texts."""
    columns = TokenColumns.empty()
    pieces = IncrementalDetokenizer(tokenizer, ())
    known = [None, *(_cut(each, count) for each in prompt.scores or ())]
    known += [None] * (len(prompt.token_ids) - len(known))  # of a prompt that could not be scored
    at = 0
    for token_id, logprobs in zip(prompt.token_ids, known, strict=True):
        columns.add(tokenizer, token_id, logprobs, min(at, len(prompt.echo)))
        at += len(pieces.add(token_id))
    return columns


def _cut(logprobs: TokenLogprobs, count: int) -> TokenLogprobs:
    """Leave out top tokens beyond `count`: another field of the request may have asked for more."""
    return TokenLogprobs(logprobs.logprob, logprobs.top[:count])


def _top(tokenizer: Tokenizer, sampled: int, logprobs: TokenLogprobs) -> dict[str, float]:
    """Most likely first, and the sampled token if it is not among them. Of tokens that read the same (parts of
    characters do), the likeliest is kept."""
    top: dict[str, float] = {}
    for token_id, logprob in (*logprobs.top, (sampled, logprobs.logprob)):
        top.setdefault(tokenizer.token_text(token_id), finite(logprob))
    return top
