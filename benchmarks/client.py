"""Sends one request over HTTP and notes when each token arrives.

Understands our servers' named events (left) and the plain chunks of any other OpenAI-compatible server (right):

```text
event: token                             data: {"choices":[{"text":" a", ...}]}
data: {"choices":[...], ...}
                                         data: {"choices":[{"text":"","finish_reason":"length"}]}
event: done
data: {..., "usage": {...}}              data: {"choices":[],"usage":{...}}

                                         data: [DONE]
```

The arrival time of a chunk of bytes is taken when the chunk is read from the socket, before it is parsed. All
tokens of a chunk have the same arrival time, because a client gets them at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from benchmarks.events import EventParser
from benchmarks.results import RequestRecord
from benchmarks.workloads import PlannedRequest

Clock = Callable[[], float]

MAX_MESSAGE = 300  # characters of a server's error message that are kept


@dataclass(slots=True)
class AnswerReader:
    """Reads a streamed answer: its tokens, its end and its errors so far.

    Attributes:
        tokens: the number of tokens that arrived. A chunk without token ids counts as one token, unless it only
            ends the answer.
        ended: whether the stream has said that it is complete.
        error: the server's error message, or a note on an event that is no object; None: no error so far.
    """

    tokens: int = 0
    ended: bool = False
    error: str | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    _text: list[str] = field(default_factory=list)
    _token_ids: list[int] = field(default_factory=list)
    _token_events: list[bytes] = field(default_factory=list)
    _parser: EventParser = field(default_factory=EventParser)

    def feed(self, chunk: bytes) -> int:
        """Parse the next bytes of the stream. Returns the number of tokens that they complete.

        Raises:
            orjson.JSONDecodeError: an event is not JSON.
        """
        before = self.tokens
        for name, data in self._parser.feed(chunk):
            if name == b"token":  # parsed later, only if `text` or `continued` is called
                self.tokens += 1
                self._token_events.append(data)
            elif data == b"[DONE]":
                self.ended = True
            else:
                body = orjson.loads(data)
                if isinstance(body, dict):
                    self._read(name, body)
                else:
                    self.error = f"an event that is no object: {error_message(body)}"
        return self.tokens - before

    def _read(self, name: bytes, body: dict[str, Any]) -> None:
        self.usage = body.get("usage") or self.usage
        if name == b"error" or body.get("error"):
            self.error = error_message(body)
            return
        if name == b"done":
            self.ended = True
            self.finish_reason = body.get("finish_reason")
            return
        for choice in body.get("choices", ()):
            reason = choice.get("finish_reason")
            self.finish_reason = reason or self.finish_reason
            self._text.append(choice.get("text") or "")
            token_ids = choice.get("token_ids") or ()
            self._token_ids += token_ids
            # Without ids, a chunk counts as a token even if it has no text: the server may hold its text back. Only
            # a chunk that has a finish reason and no text counts as no token.
            self.tokens += len(token_ids) or bool(choice.get("text")) or reason is None

    @property
    def text(self) -> str:
        return "".join([*(orjson.loads(data)["token"] for data in self._token_events), *self._text])

    def continued(self, prompt: list[int] | str) -> list[int] | str:
        """Return a prompt with the answer appended, as text if the prompt is text, else as token ids.

        Raises:
            ValueError: the prompt is token ids, but the stream has no token ids.
        """
        if isinstance(prompt, str):
            return prompt + self.text
        token_ids = [*(orjson.loads(data)["token_id"] for data in self._token_events), *self._token_ids]
        if len(token_ids) != self.tokens:
            raise ValueError("the server does not say which token ids it sampled: --text sends text instead")
        return prompt + token_ids


def error_message(body: Any) -> str:
    """Return the message of an error object as one line of bounded length."""
    error = body.get("error", body) if isinstance(body, dict) else body
    text = str(error.get("message", error) if isinstance(error, dict) else error)
    return " ".join(text.split())[:MAX_MESSAGE]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The server that requests go to, and the form of their bodies.

    Attributes:
        url: the server's root, such as `http://127.0.0.1:8004`.
        model: the server's name for its model.
        ignore_eos: whether bodies have the field `ignore_eos`, which asks for answers of full length. Servers
            that do not know this field may refuse it.
        api_key: sent as a bearer token, if given.
        fields: additional fields of every body, for this server only.
    """

    url: str
    model: str
    ignore_eos: bool = True
    api_key: str | None = None
    fields: Mapping[str, object] = field(default_factory=dict)

    def body(self, planned: PlannedRequest) -> bytes:
        """Return the JSON body of a request. Decoding is greedy, because sampling is not measured."""
        fields: dict[str, Any] = {
            "model": self.model,
            "prompt": planned.prompt,
            "max_tokens": planned.max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return orjson.dumps(fields)

    @property
    def headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return headers


async def send(
    client: httpx.AsyncClient,
    endpoint: Endpoint,
    planned: PlannedRequest,
    record: RequestRecord,
    *,
    origin_s: float,
    on_tokens: Callable[[], None] = lambda: None,
    clock: Clock = time.monotonic,
) -> AnswerReader:
    """Send one request and read its answer to the end. Errors of the server go to `record.error`, and do not raise.

    Args:
        client: an open client.
        endpoint: the server to send to.
        planned: the request to send.
        record: filled in as the answer arrives. If this call is cancelled, the record has all tokens up to then.
        origin_s: the clock's reading, in seconds, that all times of the record count from.
        on_tokens: called whenever tokens arrive.
        clock: seconds, monotonic.
    """
    body = endpoint.body(planned)
    reader = AnswerReader()
    record.error = None
    record.sent_s = clock() - origin_s
    try:
        async with client.stream(
            "POST", f"{endpoint.url}/v1/completions", content=body, headers=endpoint.headers
        ) as response:
            record.status = response.status_code
            if response.status_code != 200:
                record.error = f"HTTP {response.status_code}: {_refusal(await response.aread())}"
            elif "text/event-stream" not in response.headers.get("content-type", ""):
                record.error = f"no event stream, but {response.headers.get('content-type', 'nothing')}"
            else:
                async for chunk in response.aiter_raw():
                    arrived_s = clock() - origin_s
                    tokens = reader.feed(chunk)
                    if tokens:
                        record.token_times_s.extend([arrived_s] * tokens)
                        on_tokens()
                    if reader.ended or reader.error:
                        record.finished_s = arrived_s
    except httpx.HTTPError as error:
        record.error = f"{type(error).__name__}: {str(error) or 'no further word'}"
    except orjson.JSONDecodeError as error:
        record.error = f"an event that is not JSON: {error}"
    finally:
        _close(record, reader, clock() - origin_s)
    return reader


def new_record(planned: PlannedRequest) -> RequestRecord:
    """Return the record of a request that has not been sent yet."""
    return RequestRecord(
        index=planned.index,
        scheduled_s=planned.send_at_s,
        prompt_tokens=planned.prompt_tokens,
        max_tokens=planned.max_tokens,
        error="never sent",
    )


def _close(record: RequestRecord, reader: AnswerReader, now_s: float) -> None:
    """Fill in a record when its stream has ended. Notes an error if the stream broke off or had no tokens."""
    usage = reader.usage or {}
    record.finish_reason = reader.finish_reason
    record.completion_tokens = usage.get("completion_tokens", reader.tokens)
    record.prompt_tokens_counted = usage.get("prompt_tokens")
    if record.finished_s is None:
        record.finished_s = now_s
    if reader.error is not None:
        record.error = reader.error
    elif record.error is None and not reader.ended:
        record.error = "the stream broke off without a word"
    elif record.error is None and not reader.tokens:
        record.error = "the answer has no tokens"


def _refusal(body: bytes) -> str:
    try:
        return error_message(orjson.loads(body))
    except orjson.JSONDecodeError:
        return error_message(body.decode(errors="replace"))
