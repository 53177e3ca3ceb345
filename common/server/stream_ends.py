"""The last events of a stream, written before they are needed, for a process that passes the stream on.

```text
engine, app ── "infer.stream_ends" ──> front of a cluster ──> client
one process    whole events            another process
               ends: of each choice, and of the stream
               ended: those that the events so far contain
```

A front outlives the process that makes a stream. If that process is lost, the client still needs the last event of
each choice. Only the app knows the stream's wire format, so it writes these events when the stream begins.

It is an ASGI extension. A server asks for it with `scope["extensions"][STREAM_ENDS] = {"error": ApiError}`, the
error that a lost stream ends with (`common.server.transport`). Then the stream's messages have these fields more:

| message | field | value |
| --- | --- | --- |
| `http.response.start` | `ends` | the last event of each choice, then the stream's own end |
| `http.response.body` | `ended` | indices into `ends` of what has been sent; each body is whole events |
"""

from __future__ import annotations

from common.request import StepOutput
from common.server.errors import ApiError
from common.server.wire.format import Answer, Choice, WireFormat


class StreamEnds:
    """Writes the ends of one answer's stream, and tells which of them have been made."""

    def __init__(self, answer: Answer, wire: WireFormat) -> None:
        self._answer = answer
        self._wire = wire

    def write(self, error: ApiError) -> tuple[bytes, ...]:
        """The event that ends each choice with this error, by index; last, the stream's own end."""
        choices = (self._wire.events(choice, _failed(choice, error)) for choice in self._answer.choices)
        return (*choices, self._wire.last)

    def made(self, *, complete: bool) -> frozenset[int]:
        """Indices of the ends that have been made by the app itself.

        Args:
            complete: whether the whole stream has been made, its own end included.
        """
        choices = self._answer.choices
        ended = [choice.index for choice in choices if choice.ended]
        return frozenset([*ended, len(choices)] if complete else ended)


def _failed(choice: Choice, error: ApiError) -> StepOutput:
    return StepOutput(
        request_id="",
        token_id=None,
        text_delta="",
        finished=True,
        finish_reason=None,
        error=error,
        prompt_tokens=choice.prompt_tokens,
        completion_tokens=choice.completion_tokens,
    )
