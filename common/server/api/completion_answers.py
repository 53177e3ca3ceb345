"""The wire formats of completions: this server's named events, and OpenAI's unnamed chunks (see `formats`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from common.request import StepOutput
from common.server.api.answer import Answer, Choice, is_first
from common.server.api.chunks import (
    OPENAI_FINISH_REASONS,
    Chunks,
    PlainChunks,
    engine_reason,
    error_event,
    joined_text,
    show_prompt,
    token_ids,
)
from common.server.api.logprobs import completion_logprobs
from common.server.api.shapes import (
    ChunkChoice,
    Completion,
    CompletionChunk,
    CompletionEvent,
    PlainCompletion,
    ShownTokens,
    event,
)


class NamedCompletionEvents(Chunks):
    """The wire format of `/v1/completions`, this server's own: events named `token`, `done`, `usage` or `error`.

    The `data` of an event, except an error's, is an OpenAI chunk. `CompletionChunks` writes unnamed chunks.
    """

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
        return {"id": answer.id, "object": "text_completion", **answer.origin, "choices": choices}

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
        data = self._chunk([{**last, **self.answer.stop_reason(choice)}])
        data["finish_reason"] = output.finish_reason
        data["usage"] = choice.usage()
        return event(data, "done")


class CompletionChunks(PlainChunks[ChunkChoice]):
    """The wire format of `/openai/v1/completions`: a stream of OpenAI's unnamed chunks, or one JSON answer."""

    def choices(self, choice: Choice, output: StepOutput) -> Iterator[ChunkChoice]:
        chunk = chunk_choice(self.answer, choice, output)
        chunk["finish_reason"] = output.finish_reason and OPENAI_FINISH_REASONS[output.finish_reason]
        yield {**chunk, **self.answer.stop_reason(choice)} if output.finished else chunk

    def chunk(self, choices: list[ChunkChoice]) -> CompletionChunk:
        answer = self.answer
        return {"id": answer.id, "object": "text_completion", **answer.origin, "choices": choices}

    def empty_choice(self, choice: Choice) -> ChunkChoice:
        return empty_choice(choice)

    def whole(self, said: Sequence[Sequence[StepOutput]]) -> PlainCompletion:
        return completion(self.answer, said)


# ---------------------------------------------------------------------- objects


def completion(answer: Answer, said: Sequence[Sequence[StepOutput]]) -> PlainCompletion:
    """Return OpenAI's JSON answer. `said` has, for each choice in order, the list of all its outputs."""
    return {
        "id": answer.id,
        "object": "text_completion",
        **answer.origin,
        "choices": [
            {
                "index": choice.index,
                "text": choice.prompt.echo + joined_text(outputs),
                "logprobs": completion_logprobs(answer, choice, outputs),
                "finish_reason": OPENAI_FINISH_REASONS[engine_reason(outputs)],
                **answer.stop_reason(choice),
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
    echo = choice.prompt.echo if is_first(output) else ""
    return {
        "index": choice.index,
        "text": echo + output.text_delta,
        "logprobs": completion_logprobs(answer, choice, [output]),
        "finish_reason": None,
        **shown_tokens(answer, choice, [output]),
    }


def shown_tokens(answer: Answer, choice: Choice, said: Sequence[StepOutput]) -> ShownTokens:
    """Return vLLM's fields about tokens, as far as the request asked for them.

    `token_ids` has the tokens of these outputs. If they begin with the choice's first output, there are also
    `prompt_token_ids` and `prompt_logprobs`.
    """
    fields: ShownTokens = {}
    if answer.shown.token_ids:
        fields["token_ids"] = token_ids(said)
    if said and is_first(said[0]):
        show_prompt(fields, answer, choice.prompt)
    return fields
