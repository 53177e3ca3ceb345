"""Log-probabilities in answers: OpenAI's objects of completions and of chat, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, cast

import orjson
from pydantic import Field
from typing_extensions import TypedDict

from common.request import StepOutput, TokenLogprobs
from common.server.api.answer import Answer, Choice, Logprobs, Prompt, is_first
from common.text.tokenizer import REPLACEMENT, IncrementalDetokenizer, Tokenizer

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


class PromptLogprob(TypedDict):
    logprob: float
    rank: Annotated[int, Field(ge=1, description="among all tokens, 1 for the likeliest")]
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ChatTokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: Annotated[
        list[int], Field(description="the token's bytes in UTF-8, perhaps a part of a character")
    ]


class ChatTokenLogprobs(ChatTokenLogprob):
    top_logprobs: Annotated[list[ChatTokenLogprob], Field(description="most likely first")]


class ChatLogprobs(TypedDict):
    """Log-probabilities in a choice of chat. `content` has one entry for each sampled token."""

    content: list[ChatTokenLogprobs]
    refusal: None


def completion_logprobs(answer: Answer, choice: Choice, said: Sequence[StepOutput]) -> Logprobs | None:
    """Return the log-probabilities of the tokens of some outputs of a choice; None if there are none.

    If the prompt is echoed, the log-probabilities of a choice's first output begin with the prompt's tokens.
    """
    columns = _no_tokens()
    prompt, shown = choice.prompt, answer.shown
    if said and is_first(said[0]) and shown.echo and shown.logprobs is not None:
        if prompt.echoed_logprobs is None:
            prompt.echoed_logprobs = _echoed(answer.tokenizer, prompt, shown.logprobs)
        echoed = prompt.echoed_logprobs
        columns["tokens"] += echoed["tokens"]
        columns["token_logprobs"] += echoed["token_logprobs"]
        columns["top_logprobs"] += echoed["top_logprobs"]
        columns["text_offset"] += echoed["text_offset"]
    for output in said:
        if output.logprobs is not None and output.token_id is not None:
            offset = len(prompt.echo) + output.text_offset
            first = _begins_text(answer, choice, output)
            _add_token(columns, answer.tokenizer, output.token_id, output.logprobs, offset, first)
    return columns if columns["tokens"] else None


def _no_tokens() -> Logprobs:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _echoed(tokenizer: Tokenizer, prompt: Prompt, count: int) -> Logprobs:
    """Return the log-probabilities of an echoed prompt's tokens, with at most `count` top tokens each."""
    columns = _no_tokens()
    pieces = IncrementalDetokenizer(tokenizer, (), skip_special_tokens=False)
    # The engine reports more top tokens if another field of the request asks for more.
    known = [None, *(TokenLogprobs(each.logprob, each.top[:count]) for each in prompt.scores or ())]
    known += [None] * (len(prompt.token_ids) - len(known))  # the prompt could not be scored
    at, first = 0, True
    for token_id, logprobs in zip(prompt.token_ids, known, strict=True):
        _add_token(columns, tokenizer, token_id, logprobs, min(at, len(prompt.echo)), first)
        if token_id in tokenizer.special_ids and not prompt.echo.startswith(
            tokenizer.token_text(token_id), at
        ):
            continue  # the text is without it: the tokenizer added it, or it was left out
        at += len(pieces.add(token_id))
        first = False
    return columns


def _begins_text(answer: Answer, choice: Choice, output: StepOutput) -> bool:
    """Return whether an output's token has no text before it: neither of the prompt nor of the answer."""
    detokenizer = answer.streams[choice.index].request.detokenizer
    return is_first(output) and detokenizer is not None and detokenizer.begins_text


def _add_token(
    columns: Logprobs,
    tokenizer: Tokenizer,
    token_id: int,
    logprobs: TokenLogprobs | None,
    offset: int,
    first: bool,
) -> None:
    columns["tokens"].append(_token_name(tokenizer, token_id, first))
    columns["token_logprobs"].append(None if logprobs is None else finite(logprobs.logprob))
    columns["top_logprobs"].append(None if logprobs is None else _top(tokenizer, token_id, logprobs, first))
    columns["text_offset"].append(offset)


def _top(tokenizer: Tokenizer, sampled: int, logprobs: TokenLogprobs, first: bool) -> dict[str, float]:
    """Return log-probabilities by token text: the likeliest tokens first, then `sampled` if it is not among them.

    If several tokens have the same text, all but the first are written as they are spelled in the vocabulary.
    """
    top: dict[str, float] = {}
    named: set[int] = set()
    for token_id, logprob in (*logprobs.top, (sampled, logprobs.logprob)):
        if token_id not in named:
            named.add(token_id)
            text = _token_name(tokenizer, token_id, first)
            top[tokenizer.spelled(token_id) if text in top else text] = finite(logprob)
    return top


def _token_name(tokenizer: Tokenizer, token_id: int, first: bool) -> str:
    """Return a token's text. If the token has a part of a character, return its bytes like `bytes:\\xf0\\x9f`
    (OpenAI's form). `first`: whether no text is before the token."""
    text = tokenizer.token_text(token_id, first=first)
    if REPLACEMENT not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(token_id))


def prompt_logprobs(tokenizer: Tokenizer, prompt: Prompt, count: int) -> PromptLogprobs | None:
    """Return the field `prompt_logprobs`, already encoded as JSON; None if the prompt was not scored.

    The field is encoded once for all choices of the prompt. `count`: most top tokens for each prompt token.
    """
    if prompt.scores is None:
        return None
    if prompt.logprobs_json is None:
        entries = _prompt_logprob_entries(tokenizer, prompt.token_ids, prompt.scores, count)
        prompt.logprobs_json = orjson.dumps(entries)
    return cast("PromptLogprobs", orjson.Fragment(prompt.logprobs_json))


def _prompt_logprob_entries(
    tokenizer: Tokenizer, token_ids: Sequence[int], scores: Sequence[TokenLogprobs], count: int
) -> PromptLogprobs:
    """Return one entry for each prompt token: a dict from token id to log-probability, rank and text. The first
    token's entry is None, since no token comes before it."""
    entries: PromptLogprobs = [None]
    for token_id, logprobs in zip(token_ids[1:], scores, strict=True):
        assert logprobs.rank is not None, "a prompt's tokens are scored with their ranks"
        named: dict[int, tuple[float, int]] = {
            each: (logprob, place) for place, (each, logprob) in enumerate(logprobs.top[:count], 1)
        }
        named.setdefault(token_id, (logprobs.logprob, logprobs.rank))
        entry: dict[str, PromptLogprob] = {
            str(each): {"logprob": finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(each)}
            for each, (logprob, rank) in named.items()
        }
        entries.append(entry)
    return entries


def chat_logprobs(answer: Answer, choice: Choice, said: Sequence[StepOutput]) -> ChatLogprobs | None:
    """Return the field `logprobs` of chat for the tokens of a choice's outputs; None if it would be empty."""
    content: ChatLogprobs = {
        "content": [
            {
                **_chat_token(answer.tokenizer, output.token_id, output.logprobs.logprob, first),
                "top_logprobs": [_chat_token(answer.tokenizer, *each, first) for each in output.logprobs.top],
            }
            for output in said
            if output.logprobs is not None and output.token_id is not None
            for first in [_begins_text(answer, choice, output)]
        ],
        "refusal": None,
    }
    return content if content["content"] else None


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float, first: bool) -> ChatTokenLogprob:
    # A part of a character reads as U+FFFD. Clients put the bytes of several tokens together.
    text = tokenizer.token_text(token_id, first=first)
    raw = list(tokenizer.token_bytes(token_id, first=first))
    return {"token": text, "logprob": finite(logprob), "bytes": raw}


def finite(logprob: float) -> float:
    """Return `logprob`, or `LOWEST_LOGPROB` if `logprob` is lower: JSON has no infinity."""
    return max(logprob, LOWEST_LOGPROB)
