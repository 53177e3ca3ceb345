"""Event streams: what one is made of, and how it is sent.

A wire format turns step outputs into bytes; a route picks it. The one here is named events that are OpenAI chunks
at the same time:

```text
event: token         one for each sampled token
data: {…}

event: done          or error: one for each choice, its last
data: {…}

event: usage         only with stream_options.include_usage: all choices together
data: {…}
```

There is no `[DONE]`: every `data` is a JSON object, and the stream's end says as much.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.request import FinishReason, StepOutput, TokenLogprobs
from common.server.errors import from_exception
from common.text import Tokenizer

CLIENT_LEFT = "the client left"

T = TypeVar("T")

LOWEST_LOGPROB = -9999.0  # JSON has no infinity

#: OpenAI's word for each of the engine's reasons.
OPENAI_FINISH_REASONS: dict[FinishReason, Literal["stop", "length"]] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "cancelled": "stop",
}

# ---------------------------------------------------------------------- one answer and its choices


@dataclass(slots=True)
class Choice:
    """One choice of an answer as it grows.

    Attributes:
        index: prompt × n + j.
        prompt_index: which of the request's prompts it continues.
    """

    index: int
    prompt_index: int
    text: list[str] = field(default_factory=list)
    text_length: int = 0  # characters so far
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, output: StepOutput) -> None:
        self.text.append(output.text_delta)
        self.text_length += len(output.text_delta)
        self.prompt_tokens, self.completion_tokens = output.prompt_tokens, output.completion_tokens
        self.cached_tokens = output.cached_tokens

    def usage(self) -> dict[str, Any]:
        return _usage(self.prompt_tokens, self.completion_tokens, self.cached_tokens)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the parts of one answer have in common."""

    id: str
    created: int  # seconds since 1970
    model: str
    tokenizer: Tokenizer
    choices: Sequence[Choice]

    def header(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

    def usage(self) -> dict[str, Any]:
        """All choices together; a prompt counts once, as its first choice found it, however many continue it."""
        first = {choice.prompt_index: choice for choice in reversed(self.choices)}.values()
        return _usage(
            sum(choice.prompt_tokens for choice in first),
            sum(choice.completion_tokens for choice in self.choices),
            sum(choice.cached_tokens for choice in first),
        )

    def logprobs(self, choice: Choice, output: StepOutput) -> dict[str, list[Any]] | None:
        """OpenAI's object for one token; call it before the output is added to its choice."""
        if output.logprobs is None or output.token_id is None:
            return None
        return {
            "tokens": [self.tokenizer.token_text(output.token_id)],
            "token_logprobs": [_finite(output.logprobs.logprob)],
            "top_logprobs": [self._top_logprobs(output.logprobs)],
            "text_offset": [choice.text_length],
        }

    def _top_logprobs(self, logprobs: TokenLogprobs) -> dict[str, float]:
        """Most likely first. Of tokens that read the same (parts of characters do), the likeliest is kept."""
        top: dict[str, float] = {}
        for token_id, logprob in logprobs.top:
            top.setdefault(self.tokenizer.token_text(token_id), _finite(logprob))
        return top


def _usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


# ---------------------------------------------------------------------- wire formats


class WireFormat(Protocol):
    """One answer's outputs as bytes of its event stream."""

    def events(self, choice: Choice, output: StepOutput) -> bytes:
        """What one step has to say of one choice."""
        ...

    def closing(self) -> bytes:
        """What follows after every choice's last output."""
        ...


class NamedCompletionEvents:
    """The wire format of `/v1/completions`: see the module's docstring."""

    def __init__(self, answer: Answer, *, include_usage: bool, continuous_usage: bool) -> None:
        self.answer = answer
        self.include_usage = include_usage
        self.continuous_usage = continuous_usage
        self._header = answer.header()

    def events(self, choice: Choice, output: StepOutput) -> bytes:
        token = self._token(choice, output) if output.token_id is not None else b""
        return token + self._terminal(choice, output) if output.finished else token

    def closing(self) -> bytes:
        if not self.include_usage:
            return b""
        return event("usage", self._header | {"choices": [], "usage": self.answer.usage()})

    def _token(self, choice: Choice, output: StepOutput) -> bytes:
        logprobs = self.answer.logprobs(choice, output)
        choice.add(output)
        data = self._header | {
            "choices": [_choice_chunk(choice, text=output.text_delta, logprobs=logprobs)],
            "token": output.text_delta,
            "token_id": output.token_id,
        }
        if self.continuous_usage:
            data["usage"] = choice.usage()
        return event("token", data)

    def _terminal(self, choice: Choice, output: StepOutput) -> bytes:
        if output.finish_reason is None:
            return self._error(choice, output.error)
        reason = OPENAI_FINISH_REASONS[output.finish_reason]
        return event(
            "done",
            self._header
            | {
                "choices": [_choice_chunk(choice, finish_reason=reason)],
                "finish_reason": output.finish_reason,
                "usage": choice.usage(),
            },
        )

    def _error(self, choice: Choice, error: Exception | None) -> bytes:
        assert error is not None, "an output that finishes has a reason or an error"
        data = from_exception(error).body()
        if len(self.answer.choices) > 1:  # whose error it is
            data["choices"] = [_choice_chunk(choice)]
        return event("error", data)


def event(name: str, data: dict[str, Any]) -> bytes:
    """One server-sent event. JSON has no raw line ends, so `data` is always one line."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))


def _choice_chunk(
    choice: Choice,
    *,
    text: str = "",
    logprobs: dict[str, list[Any]] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


# ---------------------------------------------------------------------- sending


class EventStream(Response):
    """An HTTP response that sends events as they come, for as long as somebody takes them.

    Args:
        events: the stream's bytes, whole events each.
        on_close: called once at the end, with what became of the client (it left, or it stalled); None if it took
            everything.
        ping_s: seconds between comments that keep idle connections open; none comes earlier.
        send_timeout_s: a client that has taken nothing for so many seconds is given up.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        *,
        on_close: Callable[[str | None], None],
        ping_s: float = 15.0,
        send_timeout_s: float = 60.0,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.events = events
        self.on_close = on_close
        self.ping_s = ping_s
        self.send_timeout_s = send_timeout_s
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        client_gone = None
        try:
            await while_connected(receive, self._send_all(send))
        except ClientDisconnect:
            client_gone = CLIENT_LEFT
        except TimeoutError:
            # Returning from an unfinished response makes the HTTP server drop the connection.
            client_gone = f"the client took nothing for {self.send_timeout_s:g} s"
        finally:
            self.on_close(client_gone)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pinging = asyncio.create_task(self._ping(send))
        try:
            async for chunk in self.events:
                await self._send(send, chunk)
        finally:
            pinging.cancel()
            await asyncio.gather(pinging, return_exceptions=True)
        # Nothing may be left to do after this: to `receive`, the client of a complete response has disconnected.
        await self._send(send, b"", more=False)

    async def _ping(self, send: Send) -> None:
        while True:
            await asyncio.sleep(self.ping_s)
            await self._send(send, b": ping\n\n")

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        async with asyncio.timeout(self.send_timeout_s):
            await send({"type": "http.response.body", "body": body, "more_body": more})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client leaves first.

    Raises:
        ClientDisconnect: it did.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def interleave(streams: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all streams as they come, each with its stream's number. Close it when you stop early."""
    if len(streams) == 1:  # the ordinary request: its items need neither a task nor a second queue
        async for only in streams[0]:
            yield 0, only
        return
    arrived: asyncio.Queue[tuple[int, T] | None] = asyncio.Queue()

    async def forward(number: int, stream: AsyncIterator[T]) -> None:
        async for item in stream:
            arrived.put_nowait((number, item))
        arrived.put_nowait(None)

    tasks = [asyncio.create_task(forward(number, stream)) for number, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            item = await arrived.get()
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
