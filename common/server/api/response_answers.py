"""The wire format of `/v1/responses`: an answer as OpenAI's named events, or as one response.

```text
event: response.created                   before the first token; response.in_progress comes next
event: response.output_item.added         an item of the output begins: reasoning, a message, a call
event: response.content_part.added            its only part (a call has none)
event: response.output_text.delta                 a piece of its text
event: response.output_text.done                  its whole text
event: response.content_part.done
event: response.output_item.done
event: response.completed                 or response.incomplete: the whole response, with its usage
```

A reasoning item grows by `response.reasoning_text.delta`, and a call by `response.function_call_arguments.delta`.
An answer that fails ends with `error` and `response.failed`. Each `data` has the event's name as `type` and its
number as `sequence_number`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from common.request import StepOutput
from common.server.api.answer import Answer, Choice, WireFormat
from common.server.api.logprobs import response_logprobs
from common.server.api.parts import ArgumentsPart, CallPart, ReasoningPart, TextPart
from common.server.api.response_shapes import (
    EventType,
    ResponseEvent,
    ResponseObject,
    ResponseUsage,
    Status,
)
from common.server.api.responses import ResponsesRequest
from common.server.api.shapes import ChatTokenLogprobs, event
from common.server.errors import from_exception

#: `sequence_number` of the first event that `lost` returns. Every event that was sent before has a lower number.
AFTER_ALL = 2**31

#: The middle of the names of an item's `delta` and `done` events, for each type of item.
GROWS_BY = {
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
}
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ResponseEvents(WireFormat):
    """Writes one response, as a stream of OpenAI's named events or as one JSON object.

    Args:
        answer: the answer, which has one choice.
        wanted: the answer's request, whose settings the response repeats.
    """

    last = b""

    def __init__(self, answer: Answer, wanted: ResponsesRequest) -> None:
        super().__init__(answer)
        self._wanted = wanted
        params = answer.streams[0].request.params
        self._settings = wanted.settings(params.temperature, params.top_p)
        self._output: list[Any] = []  # `OutputItem`s; one that is in progress is the last
        self._pieces: list[str] = []  # of that item's text
        self._logprobs: list[ChatTokenLogprobs] = []  # of tokens whose text has not come yet
        self._num_events = 0
        self._whole: ResponseObject | None = None  # once the answer has ended

    def opening(self) -> bytes:
        return _encoded(
            self._event(name, response=self._response("in_progress"))
            for name in ("response.created", "response.in_progress")
        )

    def events(self, choice: Choice, output: StepOutput) -> bytes:
        events = _encoded(self._events(choice, output))
        if self._whole is not None:
            self._wanted.keep(self._whole)
        return events

    def lost(self, choice: Choice, failed: StepOutput) -> bytes:
        written, self._num_events = self._num_events, AFTER_ALL
        end = self.events(choice, failed)
        self._num_events = written
        return end

    def closing(self) -> bytes:
        return b""

    def whole(self, said: Sequence[Sequence[StepOutput]]) -> ResponseObject:
        (choice,), (outputs,) = self.answer.choices, said
        events = [each for output in outputs for each in self._events(choice, output)]
        # In a stream only the pieces have log-probabilities, since its last events repeat the text four times.
        for each in events:
            for entry in each.get("logprobs", ()):
                self._output[each["output_index"]]["content"][0]["logprobs"].append(entry)
        response = events[-1]["response"]
        self._wanted.keep(response)
        return response

    # ------------------------------------------------------------------ events

    def _event(self, name: EventType, **fields: Any) -> ResponseEvent:
        number, self._num_events = self._num_events, self._num_events + 1
        return {"type": name, "sequence_number": number, **fields}  # type: ignore[typeddict-item]

    def _events(self, choice: Choice, output: StepOutput) -> Iterator[ResponseEvent]:
        """Yield the events of one output. To send events, encode each before you take the next: they share items,
        which grow."""
        if output.error is not None:
            yield from self._failure(output.error)
            return
        self._logprobs += response_logprobs(self.answer, choice, output)
        for part in choice.parts(output):
            logprobs, self._logprobs = self._logprobs, []
            match part:
                case TextPart(text):
                    if not self._in_progress("message"):
                        yield from self._begin("message", role="assistant", content=[])
                    yield self._piece(text, logprobs=logprobs)
                case ReasoningPart(text):
                    if not self._in_progress("reasoning"):
                        yield from self._begin("reasoning", summary=[], content=[], encrypted_content=None)
                    yield self._piece(text)
                case CallPart(_, call_id, name):
                    yield from self._begin(
                        "function_call", call_id=call_id, **self._wanted.called(name), arguments=""
                    )
                case ArgumentsPart(_, text):
                    yield self._piece(text)
        if output.finished:
            yield from self._end(choice, output)

    def _in_progress(self, kind: str) -> bool:
        """True if an item of this type is in progress."""
        return bool(self._output) and self._output[-1]["type"] == kind

    def _begin(self, kind: str, **fields: Any) -> Iterator[ResponseEvent]:
        """End the item in progress, and begin an item of type `kind`. Yields the events of both."""
        yield from self._finish("completed")
        number = f"{self.answer.id.removeprefix('resp_')}_{len(self._output)}"
        self._output.append(
            {"id": f"{PREFIXES[kind]}_{number}", "type": kind, "status": "in_progress", **fields}
        )
        yield self._event("response.output_item.added", output_index=self._index, item=self._output[-1])
        if "content" in fields:
            yield self._event("response.content_part.added", **self._place, part=_part(kind, ""))

    def _piece(self, text: str, **fields: Any) -> ResponseEvent:
        """Add a piece of text to the item in progress, and return the `delta` event of that piece."""
        self._pieces.append(text)
        name: Any = f"response.{GROWS_BY[self._output[-1]['type']]}.delta"
        return self._event(name, **self._place, delta=text, **fields)

    def _finish(self, status: Status) -> Iterator[ResponseEvent]:
        """End the item in progress, if there is any, with this status. Yields the events of the item's end."""
        if not self._output or self._output[-1]["status"] != "in_progress":
            return
        item, text, self._pieces = self._output[-1], "".join(self._pieces), []
        kind = item["type"]
        name: Any = f"response.{GROWS_BY[kind]}.done"
        if kind == "function_call":
            item["arguments"] = text
            yield self._event(name, **self._place, arguments=text)
        else:
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            yield self._event(name, **self._place, text=text, **more)
            item["content"] = [_part(kind, text)]
            yield self._event("response.content_part.done", **self._place, part=item["content"][0])
        item["status"] = status
        yield self._event("response.output_item.done", output_index=self._index, item=item)

    @property
    def _index(self) -> int:
        return len(self._output) - 1

    @property
    def _place(self) -> dict[str, Any]:
        """Fields of an event about the item in progress: the item's id and index and, if the item has content, the
        content's index, 0."""
        item = self._output[-1]
        place = {"item_id": item["id"], "output_index": self._index}
        return place | {"content_index": 0} if "content" in item else place

    # ------------------------------------------------------------------ the last events

    def _end(self, choice: Choice, output: StepOutput) -> Iterator[ResponseEvent]:
        status: Status = "incomplete" if output.finish_reason == "length" else "completed"
        if all(item["type"] == "reasoning" for item in self._output) and status == "completed":
            yield from self._begin("message", role="assistant", content=[])  # clients look for an answer
        broken_off = choice.reader is not None and choice.reader.in_call
        yield from self._finish("incomplete" if broken_off else status)
        response = self._response(status)
        response["usage"] = self._usage(choice)
        if status == "completed":
            response["completed_at"] = int(time.time())
        else:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._whole = response
        name: Any = f"response.{status}"
        yield self._event(name, response=response)

    def _failure(self, error: Exception) -> Iterator[ResponseEvent]:
        yield from self._finish("incomplete")
        failure = from_exception(error)
        # OpenAI documents these three fields. Its server sends an object `error`, for which its libraries raise.
        told = {"code": failure.code, "message": failure.message, "param": failure.param}
        yield self._event("error", **told, **failure.body())
        response = self._response("failed")
        response["error"] = {"code": "server_error", "message": failure.message}  # one of OpenAI's codes
        yield self._event("response.failed", response=response)

    def _response(self, status: Any) -> ResponseObject:
        answer = self.answer
        return {
            "id": answer.id,
            "object": "response",
            "created_at": answer.created,
            "completed_at": None,
            "model": answer.model,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": self._output,
            "usage": None,
            **self._settings,
        }

    def _usage(self, choice: Choice) -> ResponseUsage:
        usage = choice.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]
            },
            "total_tokens": usage["total_tokens"],
        }


def _part(kind: str, text: str) -> dict[str, Any]:
    """Return the content part of a message or of a reasoning item. Each of these items has one."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _encoded(events: Iterable[ResponseEvent]) -> bytes:
    return b"".join(event(each, each["type"]) for each in events)
