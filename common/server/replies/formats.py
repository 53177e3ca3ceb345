"""The wire formats: one answer's outputs as the bytes of a stream, or as one JSON object.

Named events (`/v1/completions`) are OpenAI chunks at the same time. There is no `[DONE]`: every `data` is a JSON
object, and the stream's end says as much.

```text
event: token         one for each sampled token
data: {…}

event: done          or error: one for each choice, its last
data: {…}

event: usage         only with stream_options.include_usage: all choices together
data: {…}
```

OpenAI's own streams, which strict tools want, are unnamed chunks. A choice that fails ends with
`data: {"error": {…}}`, which says in `choices` whose it is if there are several.

```text
data: {… "delta": {"role": "assistant", "content": ""} …}      chat only: first of each choice
data: {…}            one for each sampled token; the one with a finish_reason has a choice's last text
data: {…}            only with stream_options.include_usage: no choices, and the usage of all together
data: [DONE]
```
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar, cast

import orjson

from common.request import FinishReason, StepOutput, TokenLogprobs
from common.server.errors import from_exception
from common.server.replies.answer import Answer, Choice, Prompt, WireFormat, is_first
from common.server.replies.shapes import (
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChatTokenLogprob,
    ChunkChoice,
    Completion,
    CompletionChunk,
    CompletionEvent,
    Delta,
    ErrorEvent,
    Logprobs,
    OpenAIReason,
    PlainCompletion,
    PromptLogprob,
    PromptLogprobs,
    ShownTokens,
    event,
)
from common.text import REPLACEMENT, IncrementalDetokenizer, Tokenizer

ChoiceT = TypeVar("ChoiceT")

LOWEST_LOGPROB = -9999.0  # JSON has no infinity

DONE = b"data: [DONE]\n\n"

#: OpenAI's word for each of the engine's reasons.
OPENAI_FINISH_REASONS: dict[FinishReason, OpenAIReason] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "cancelled": "stop",
}


# ---------------------------------------------------------------------- streams


class NamedCompletionEvents(WireFormat):
    """Named events that are OpenAI chunks: the phases' own stream."""

    last = b""

    def events(self, choice: Choice, output: StepOutput) -> bytes:
        token = self._token(choice, output) if output.token_id is not None else b""
        return token + self._terminal(choice, output) if output.finished else token

    def closing(self) -> bytes:
        if not self.include_usage:
            return b""
        data = self._chunk([])
        data["usage"] = self.answer.usage()
        return event(data, "usage")

    def whole(self, said: Sequence[Sequence[StepOutput]]) -> Completion:
        return {**completion(self.answer, said), "finish_reason": engine_reason(said[0])}

    def _chunk(self, choices: list[ChunkChoice]) -> CompletionEvent:
        answer = self.answer
        return {
            "id": answer.id,
            "object": "text_completion",
            "created": answer.created,
            "model": answer.model,
            "choices": choices,
        }

    def _token(self, choice: Choice, output: StepOutput) -> bytes:
        data = self._chunk([chunk_choice(self.answer, choice, output)])
        data["token"] = output.text_delta
        data["token_id"] = output.token_id
        if self.continuous_usage:
            data["usage"] = choice.usage()
        return event(data, "token")

    def _terminal(self, choice: Choice, output: StepOutput) -> bytes:
        if output.finish_reason is None:
            return event(error_event(self.answer, output, empty_choice(choice)), "error")
        # An answer without tokens has no token event, so this one has the prompt.
        without_tokens = self.answer.shown.prompt_only
        last = chunk_choice(self.answer, choice, output) if without_tokens else empty_choice(choice)
        last["finish_reason"] = OPENAI_FINISH_REASONS[output.finish_reason]
        data = self._chunk([last])
        data["finish_reason"] = output.finish_reason
        data["usage"] = choice.usage()
        return event(data, "done")


class PlainChunks(WireFormat, Generic[ChoiceT]):
    """OpenAI's own streams: the part that completions and chat share."""

    last = DONE

    @abstractmethod
    def choices(self, choice: Choice, output: StepOutput) -> Iterator[ChoiceT]:
        """Yield the choice object of each chunk of one output."""

    @abstractmethod
    def chunk(self, choices: list[ChoiceT]) -> CompletionChunk | ChatCompletionChunk:
        """Return a chunk with these choices."""

    @abstractmethod
    def empty_choice(self, choice: Choice) -> Mapping[str, object]:
        """Return a choice object without text."""

    def events(self, choice: Choice, output: StepOutput) -> bytes:
        if output.error is not None:
            return event(error_event(self.answer, output, self.empty_choice(choice)))
        chunks = [self.chunk([each]) for each in self.choices(choice, output)]
        if self.include_usage:  # then every chunk has the key, with null until the last one
            for chunk in chunks:
                chunk["usage"] = choice.usage() if self.continuous_usage else None
        return b"".join(map(event, chunks))

    def closing(self) -> bytes:
        if not self.include_usage:
            return DONE
        chunk = self.chunk([])
        chunk["usage"] = self.answer.usage()
        return event(chunk) + DONE


class CompletionChunks(PlainChunks[ChunkChoice]):
    """The wire format of `/openai/v1/completions`."""

    def choices(self, choice: Choice, output: StepOutput) -> Iterator[ChunkChoice]:
        chunk = chunk_choice(self.answer, choice, output)
        chunk["finish_reason"] = output.finish_reason and OPENAI_FINISH_REASONS[output.finish_reason]
        yield chunk

    def chunk(self, choices: list[ChunkChoice]) -> CompletionChunk:
        answer = self.answer
        return {
            "id": answer.id,
            "object": "text_completion",
            "created": answer.created,
            "model": answer.model,
            "choices": choices,
        }

    def empty_choice(self, choice: Choice) -> ChunkChoice:
        return empty_choice(choice)

    def whole(self, said: Sequence[Sequence[StepOutput]]) -> PlainCompletion:
        return completion(self.answer, said)


class ChatChunks(PlainChunks[ChatChunkChoice]):
    """The wire format of chat."""

    def __init__(self, answer: Answer, *, include_usage: bool, continuous_usage: bool) -> None:
        super().__init__(answer, include_usage=include_usage, continuous_usage=continuous_usage)
        self._begun: set[int] = set()  # choices whose role has been said

    def choices(self, choice: Choice, output: StepOutput) -> Iterator[ChatChunkChoice]:
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            yield _chat_chunk(choice, {"role": "assistant", "content": ""})
        yield _chat_chunk(
            choice,
            {"content": output.text_delta},
            logprobs=chat_logprobs(self.answer.tokenizer, [output]),
            finish_reason=output.finish_reason and OPENAI_FINISH_REASONS[output.finish_reason],
        )

    def chunk(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        answer = self.answer
        return {
            "id": answer.id,
            "object": "chat.completion.chunk",
            "created": answer.created,
            "model": answer.model,
            "choices": choices,
        }

    def empty_choice(self, choice: Choice) -> Mapping[str, object]:
        return {"index": choice.index, "delta": {}, "logprobs": None, "finish_reason": None}

    def whole(self, said: Sequence[Sequence[StepOutput]]) -> ChatCompletion:
        answer = self.answer
        return {
            "id": answer.id,
            "object": "chat.completion",
            "created": answer.created,
            "model": answer.model,
            "choices": [
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": joined_text(outputs), "refusal": None},
                    "logprobs": chat_logprobs(answer.tokenizer, outputs),
                    "finish_reason": OPENAI_FINISH_REASONS[engine_reason(outputs)],
                }
                for choice, outputs in zip(answer.choices, said, strict=True)
            ],
            "usage": answer.usage(),
        }


def _chat_chunk(
    choice: Choice,
    delta: Delta,
    *,
    logprobs: ChatLogprobs | None = None,
    finish_reason: OpenAIReason | None = None,
) -> ChatChunkChoice:
    return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def error_event(answer: Answer, output: StepOutput, empty_choice: Mapping[str, object]) -> ErrorEvent:
    """Return the object that ends a choice which failed.

    Args:
        answer: the choice's answer.
        output: the choice's last output.
        empty_choice: the choice without text, which says whose error it is if the answer has several choices.
    """
    assert output.error is not None, "an output that finishes has a reason or an error"
    data: ErrorEvent = {"error": from_exception(output.error).body()["error"]}
    if len(answer.choices) > 1:
        data["choices"] = [empty_choice]
    return data


# ---------------------------------------------------------------------- objects of a completion


def completion(answer: Answer, said: Sequence[Sequence[StepOutput]]) -> PlainCompletion:
    """Return the JSON answer."""
    return {
        "id": answer.id,
        "object": "text_completion",
        "created": answer.created,
        "model": answer.model,
        "choices": [
            {
                "index": choice.index,
                "text": choice.prompt.echo + joined_text(outputs),
                "logprobs": completion_logprobs(answer, choice, outputs),
                "finish_reason": OPENAI_FINISH_REASONS[engine_reason(outputs)],
                **shown_tokens(answer, choice, outputs),
            }
            for choice, outputs in zip(answer.choices, said, strict=True)
        ],
        "usage": answer.usage(),
    }


def empty_choice(choice: Choice) -> ChunkChoice:
    """Return a choice object without text."""
    return {"index": choice.index, "text": "", "logprobs": None, "finish_reason": None}


def chunk_choice(answer: Answer, choice: Choice, output: StepOutput) -> ChunkChoice:
    """Return one output of a choice as a stream's chunk has it, without its `finish_reason`."""
    text = choice.leading(output) + output.text_delta
    return {
        "index": choice.index,
        "text": text,
        "logprobs": completion_logprobs(answer, choice, [output], offset=choice.text_length - len(text)),
        "finish_reason": None,
        **shown_tokens(answer, choice, [output]),
    }


def shown_tokens(answer: Answer, choice: Choice, said: Sequence[StepOutput]) -> ShownTokens:
    """Return vLLM's extension fields for these outputs. Fields about the prompt go with a choice's first output."""
    shown = answer.shown
    first = bool(said) and is_first(said[0])
    fields: ShownTokens = {}
    if shown.token_ids:
        fields["token_ids"] = [output.token_id for output in said if output.token_id is not None]
        if first:
            fields["prompt_token_ids"] = list(choice.prompt.token_ids)
    if shown.prompt_logprobs is not None and first:
        fields["prompt_logprobs"] = _prompt_logprobs(answer.tokenizer, choice.prompt, shown.prompt_logprobs)
    return fields


def joined_text(said: Sequence[StepOutput]) -> str:
    """Return the text of a choice's outputs."""
    return "".join(output.text_delta for output in said)


def engine_reason(said: Sequence[StepOutput]) -> FinishReason:
    """Return the reason why a choice ended that did not fail."""
    reason = said[-1].finish_reason
    assert reason is not None, "a choice that did not fail has a reason"
    return reason


# ---------------------------------------------------------------------- log-probabilities


def completion_logprobs(
    answer: Answer, choice: Choice, said: Sequence[StepOutput], *, offset: int = 0
) -> Logprobs | None:
    """Return the log-probabilities of the tokens of some outputs, and of an echoed prompt; None if not asked for.

    Args:
        answer: the choice's answer.
        choice: the choice that the outputs belong to.
        said: outputs, in order.
        offset: characters of the choice's text before them.
    """
    columns: Logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    prompt, shown = choice.prompt, answer.shown
    if said and is_first(said[0]) and shown.echo and shown.logprobs is not None:
        if prompt.echoed_logprobs is None:
            prompt.echoed_logprobs = _echoed(answer.tokenizer, prompt, shown.logprobs)
        columns["tokens"] += prompt.echoed_logprobs["tokens"]
        columns["token_logprobs"] += prompt.echoed_logprobs["token_logprobs"]
        columns["top_logprobs"] += prompt.echoed_logprobs["top_logprobs"]
        columns["text_offset"] += prompt.echoed_logprobs["text_offset"]
        offset += len(prompt.echo)
    for output in said:
        if output.logprobs is not None and output.token_id is not None:
            _add_token(columns, answer.tokenizer, output.token_id, output.logprobs, offset)
        offset += len(output.text_delta)
    return columns if columns["tokens"] else None


def _echoed(tokenizer: Tokenizer, prompt: Prompt, count: int) -> Logprobs:
    """Return the log-probabilities of a prompt that stands at the beginning of its choices' texts."""
    columns: Logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    pieces = IncrementalDetokenizer(tokenizer, ())
    known = [None, *(_cut(each, count) for each in prompt.scores or ())]
    known += [None] * (len(prompt.token_ids) - len(known))  # the prompt could not be scored
    at = 0
    for token_id, logprobs in zip(prompt.token_ids, known, strict=True):
        _add_token(columns, tokenizer, token_id, logprobs, min(at, len(prompt.echo)))
        at += len(pieces.add(token_id))
    return columns


def _add_token(
    columns: Logprobs, tokenizer: Tokenizer, token_id: int, logprobs: TokenLogprobs | None, offset: int
) -> None:
    columns["tokens"].append(tokenizer.token_text(token_id))
    columns["token_logprobs"].append(None if logprobs is None else finite(logprobs.logprob))
    columns["top_logprobs"].append(None if logprobs is None else _top(tokenizer, token_id, logprobs))
    columns["text_offset"].append(offset)


def _cut(logprobs: TokenLogprobs, count: int) -> TokenLogprobs:
    """Leave out top tokens beyond `count`: another field of the request may have asked for more."""
    return TokenLogprobs(logprobs.logprob, logprobs.top[:count])


def _top(tokenizer: Tokenizer, sampled: int, logprobs: TokenLogprobs) -> dict[str, float]:
    """Return log-probabilities by token text, the likeliest first, then the sampled token if it is not among them.

    Several tokens may read the same (parts of characters do). The likeliest of them is kept.
    """
    top: dict[str, float] = {}
    for token_id, logprob in (*logprobs.top, (sampled, logprobs.logprob)):
        top.setdefault(tokenizer.token_text(token_id), finite(logprob))
    return top


def _prompt_logprobs(tokenizer: Tokenizer, prompt: Prompt, count: int) -> PromptLogprobs | None:
    """Return a prompt's log-probabilities as encoded JSON, once for all its choices; None if not scored."""
    if prompt.scores is None:
        return None
    if prompt.logprobs_json is None:
        entries = _prompt_logprob_entries(tokenizer, prompt.token_ids, prompt.scores, count)
        prompt.logprobs_json = orjson.dumps(entries)
    return cast("PromptLogprobs", orjson.Fragment(prompt.logprobs_json))


def _prompt_logprob_entries(
    tokenizer: Tokenizer, token_ids: Sequence[int], scores: Sequence[TokenLogprobs], count: int
) -> PromptLogprobs:
    """Return an entry for each token of a prompt, by token id. The first has none: nothing comes before it."""
    entries: PromptLogprobs = [None]
    for token_id, logprobs in zip(token_ids[1:], scores, strict=True):
        assert logprobs.rank is not None, "a prompt's tokens are scored with their ranks"
        named: dict[int, tuple[float, int]] = {
            each: (logprob, place) for place, (each, logprob) in enumerate(logprobs.top[:count], 1)
        }
        named.setdefault(token_id, (logprobs.logprob, logprobs.rank))
        entry: dict[str, PromptLogprob] = {
            str(each): {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": tokenizer.token_text(each),
            }
            for each, (logprob, rank) in named.items()
        }
        entries.append(entry)
    return entries


def chat_logprobs(tokenizer: Tokenizer, said: Sequence[StepOutput]) -> ChatLogprobs | None:
    """Return the log-probabilities of the tokens of some outputs; None if not asked for."""
    content: ChatLogprobs = {
        "content": [
            {
                **_chat_token(tokenizer, output.token_id, output.logprobs.logprob),
                "top_logprobs": [_chat_token(tokenizer, *each) for each in output.logprobs.top],
            }
            for output in said
            if output.logprobs is not None and output.token_id is not None
        ],
        "refusal": None,
    }
    return content if content["content"] else None


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> ChatTokenLogprob:
    text = tokenizer.token_text(token_id)
    # Part of a character reads as U+FFFD, whose bytes would be others than the token's.
    raw = None if REPLACEMENT in text else list(text.encode())
    return {"token": text, "logprob": finite(logprob), "bytes": raw}


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold."""
    return max(logprob, LOWEST_LOGPROB)
