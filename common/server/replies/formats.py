"""The wire formats: one answer's outputs as the bytes of a stream, or as one JSON object.

Named events (`/v1/completions`) are OpenAI chunks at the same time. There is no `[DONE]`: every `data` is a JSON
object, and the stream ends with the HTTP response.

```text
event: token         one for each sampled token
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
data: {…}            one for each sampled token; the one with a finish_reason has a choice's last text
data: {…}            only with stream_options.include_usage: no choices, and the usage of all together
data: [DONE]
```
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from common.request import FinishReason, StepOutput
from common.server.errors import from_exception
from common.server.replies.answer import Answer, Choice, Prompt, WireFormat, is_first
from common.server.replies.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from common.server.replies.parts import ArgumentsPart, CallPart, Part, ReasoningPart, TextPart
from common.server.replies.shapes import (
    AnswerTokens,
    AssistantMessage,
    CalledFunction,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChatReason,
    ChunkChoice,
    Completion,
    CompletionChunk,
    CompletionEvent,
    Delta,
    ErrorEvent,
    FunctionDelta,
    OpenAIReason,
    PlainCompletion,
    PromptTokens,
    ShownTokens,
    ToolCall,
    event,
)
from common.server.requests.generation import GenerationRequest, StreamOptions

ChoiceT = TypeVar("ChoiceT")

DONE = b"data: [DONE]\n\n"

#: OpenAI's word for each of the engine's reasons.
OPENAI_FINISH_REASONS: dict[FinishReason, OpenAIReason] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "cancelled": "stop",
}


# ---------------------------------------------------------------------- streams


class Chunks(WireFormat):
    """Streams whose chunks may have a usage.

    Args:
        answer: the answer.
        wanted: its request, whose `stream_options` say which chunks have the usage.
    """

    def __init__(self, answer: Answer, wanted: GenerationRequest) -> None:
        super().__init__(answer)
        options = wanted.stream_options or StreamOptions()
        self.include_usage = bool(options.include_usage)
        self.continuous_usage = bool(options.continuous_usage_stats)


class NamedCompletionEvents(Chunks):
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
            "system_fingerprint": answer.fingerprint,
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


class PlainChunks(Chunks, Generic[ChoiceT]):
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
            "system_fingerprint": answer.fingerprint,
            "choices": choices,
        }

    def empty_choice(self, choice: Choice) -> ChunkChoice:
        return empty_choice(choice)

    def whole(self, said: Sequence[Sequence[StepOutput]]) -> PlainCompletion:
        return completion(self.answer, said)


class ChatChunks(PlainChunks[ChatChunkChoice]):
    """The wire format of chat."""

    def __init__(self, answer: Answer, wanted: GenerationRequest) -> None:
        super().__init__(answer, wanted)
        self._begun: set[int] = set()  # indices of choices whose role has been sent
        self._sent_prompt = False  # whether the fields about the prompt have been sent

    def choices(self, choice: Choice, output: StepOutput) -> Iterator[ChatChunkChoice]:
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            may_call = choice.reader is not None and choice.reader.may_call
            nothing = None if may_call else ""
            yield _chat_chunk(choice, {"role": "assistant", "content": choice.prompt.echo or nothing})
        shown = answer_tokens(self.answer, [output])
        logprobs = chat_logprobs(self.answer.tokenizer, [output])
        deltas = _deltas(choice, output)
        # Text that is held back needs no chunk. The output's token does, if it is shown, and so does an end.
        if not deltas and (shown or logprobs or output.finished):
            deltas.append({})
        for number, delta in enumerate(deltas, 1):
            chunk = _chat_chunk(choice, delta, logprobs=logprobs)
            if number == len(deltas) and output.finish_reason is not None:
                chunk["finish_reason"] = _chat_reason(choice, output.finish_reason)
            yield {**chunk, **shown}
            logprobs, shown = None, {}

    def chunk(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        answer = self.answer
        chunk: ChatCompletionChunk = {
            "id": answer.id,
            "object": "chat.completion.chunk",
            "created": answer.created,
            "model": answer.model,
            "system_fingerprint": answer.fingerprint,
            "choices": choices,
        }
        if not self._sent_prompt:
            self._sent_prompt = True
            show_prompt(chunk, answer, answer.choices[0].prompt)
        return chunk

    def empty_choice(self, choice: Choice) -> Mapping[str, object]:
        return {"index": choice.index, "delta": {}, "logprobs": None, "finish_reason": None}

    def whole(self, said: Sequence[Sequence[StepOutput]]) -> ChatCompletion:
        answer = self.answer
        completion: ChatCompletion = {
            "id": answer.id,
            "object": "chat.completion",
            "created": answer.created,
            "model": answer.model,
            "system_fingerprint": answer.fingerprint,
            "choices": [
                {
                    "index": choice.index,
                    "message": _message(choice, outputs),
                    "logprobs": chat_logprobs(answer.tokenizer, outputs),
                    "finish_reason": _chat_reason(choice, engine_reason(outputs)),
                    **answer_tokens(answer, outputs),
                }
                for choice, outputs in zip(answer.choices, said, strict=True)
            ],
            "usage": answer.usage(),
        }
        show_prompt(completion, answer, answer.choices[0].prompt)
        return completion


def _chat_chunk(choice: Choice, delta: Delta, *, logprobs: ChatLogprobs | None = None) -> ChatChunkChoice:
    return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _deltas(choice: Choice, output: StepOutput) -> list[Delta]:
    """Return the parts of an output, in OpenAI's form."""
    if choice.reader is None:
        return [{"content": output.text_delta}]
    return [_delta(part) for part in choice.parts(output)]


def _delta(part: Part) -> Delta:
    match part:
        case TextPart(text):
            return {"content": text}
        case ReasoningPart(text):
            return {"reasoning_content": text}
        case CallPart(index, call_id, name):
            function: FunctionDelta = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case ArgumentsPart(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _message(choice: Choice, said: Sequence[StepOutput]) -> AssistantMessage:
    """Return the message of a choice, from all of its outputs."""
    reader = choice.reader
    if reader is None:
        return {"role": "assistant", "content": choice.prompt.echo + joined_text(said), "refusal": None}
    text, reasoning, calls = choice.prompt.echo, "", list[ToolCall]()
    for part in (part for output in said for part in choice.parts(output)):
        match part:
            case TextPart(piece):
                text += piece
            case ReasoningPart(piece):
                reasoning += piece
            case CallPart(_, call_id, name):
                called: CalledFunction = {"name": name, "arguments": ""}
                calls.append({"id": call_id, "type": "function", "function": called})
            case ArgumentsPart(index, piece):
                calls[index]["function"]["arguments"] += piece
    message: AssistantMessage = {"role": "assistant", "content": text, "refusal": None}
    if calls:
        message["content"] = text or None
        message["tool_calls"] = calls
    if reader.thinks:
        message["reasoning_content"] = reasoning or None
    return message


def _chat_reason(choice: Choice, reason: FinishReason) -> ChatReason:
    """Return OpenAI's word for the end of a choice whose text has been read."""
    reader = choice.reader
    word = OPENAI_FINISH_REASONS[reason]
    return "tool_calls" if word == "stop" and reader is not None and reader.has_called else word


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
        "system_fingerprint": answer.fingerprint,
        "choices": [
            {
                "index": choice.index,
                "text": choice.prompt.echo + joined_text(outputs),
                "logprobs": completion_logprobs(answer, choice, outputs, len(choice.prompt.echo)),
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
    """Return the choice object of a stream's chunk for one output, with `finish_reason` None."""
    if answer.text_only:
        return {"index": choice.index, "text": output.text_delta, "logprobs": None, "finish_reason": None}
    before = len(choice.prompt.echo) + choice.text_length - len(output.text_delta)
    echo = choice.prompt.echo if is_first(output) else ""
    return {
        "index": choice.index,
        "text": echo + output.text_delta,
        "logprobs": completion_logprobs(answer, choice, [output], before),
        "finish_reason": None,
        **shown_tokens(answer, choice, [output]),
    }


def shown_tokens(answer: Answer, choice: Choice, said: Sequence[StepOutput]) -> ShownTokens:
    """Return vLLM's extension fields for these outputs. Fields about the prompt go with a choice's first output."""
    fields: ShownTokens = {}
    if answer.shown.token_ids:
        fields["token_ids"] = token_ids(said)
    if said and is_first(said[0]):
        show_prompt(fields, answer, choice.prompt)
    return fields


def answer_tokens(answer: Answer, said: Sequence[StepOutput]) -> AnswerTokens:
    """Return the token ids of these outputs, if the request asked for token ids."""
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
    """Return the text of a choice's outputs."""
    return "".join(output.text_delta for output in said)


def engine_reason(said: Sequence[StepOutput]) -> FinishReason:
    """Return the engine's finish reason of a choice that did not fail."""
    reason = said[-1].finish_reason
    assert reason is not None, "a choice that did not fail has a reason"
    return reason
