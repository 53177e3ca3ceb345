"""Lines of the log: one for each request at its end or refusal, and one every ten seconds while there is work.

A line is text for people, or JSON for programs. Neither prompts nor answers are in it.

```json
{"time": "2026-01-31T12:00:00.123Z", "level": "INFO", "message": "ready: …", "logger": "common.server.run"}
```

A JSON line about a request has its numbers as fields beside the message. One about an exception has a `traceback`.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import time
from collections import Counter
from typing import Any, Literal

from common.hosting.async_engine import AsyncEngine, RequestStream
from common.server.api.answer import Answer
from common.server.errors import ApiError, from_exception
from common.startup.process_memory import return_freed_memory

#: The attribute of a log record that holds its fields: `logger.info(…, extra={FIELDS: {…}})`.
FIELDS = "fields"

PULSE_EVERY_S = 10.0
CLIENT_LEFT = "the client left"


def configure_logging(level: str, form: Literal["text", "json"] = "text") -> None:
    """Log one line per event to stderr. The HTTP server's own lines are logged at level debug only."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonLines() if form == "json" else TextLines("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level != "debug":
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(is_news)


class TextLines(logging.Formatter):
    """Formats a log record as one line of text, and the lines of its traceback.

    Characters that are not printable are escaped: a client's text can neither end a line nor colour it.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name of a method of logging
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return "\n".join(map(printable, super().formatException(ei).split("\n")))


def printable(text: str) -> str:
    """Return a text with an escape, such as `\\x1b`, for each character that is not printable."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


class JsonLines(logging.Formatter):
    """Formats a log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "message": record.getMessage(),
            "logger": record.name,
        }
        line |= getattr(record, FIELDS, {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # ASCII, so that no character can end the line


def is_news(record: logging.LogRecord) -> bool:
    """Return False for lines of uvicorn that repeat a line of this server, or that advise to install WebSockets."""
    return not str(record.msg).startswith(
        (
            "ASGI callable returned without completing response.",  # the client reads too slowly
            "Invalid HTTP request received.",
            "Unsupported upgrade request.",  # to a protocol that this server does not have
            "No supported WebSocket library detected.",
        )
    )


logger = logging.getLogger(__name__)


def log_end(
    answer: Answer,
    *,
    asked_s: float,
    client: str | None,
    user: str | None,
    request_id: str | None,
    client_left: bool,
) -> None:
    """Log one line about an answer, whose choices have all ended or were cancelled: token counts, times, endings.

    `asked_s` is the time by which the request had come, on `time.monotonic`'s clock. `request_id` is the one that
    the client sent.
    """
    streams = answer.streams
    prompts = {
        id(choice.prompt): stream.request.num_prompt_tokens
        for choice, stream in zip(answer.choices, streams, strict=True)
    }
    begun = [stream.first_token_s for stream in streams if stream.first_token_s is not None]
    endings = Counter(_ending(stream) for stream in streams)
    prompt_tokens, new_tokens = sum(prompts.values()), sum(stream.received_tokens for stream in streams)
    first_s = min(begun) - asked_s if begun else None
    gap_s = max(stream.longest_gap_s for stream in streams) if begun else None
    # The rate covers the time after the first token, since the time to the first token is logged by itself.
    decode_s = max(stream.latest_token_s for stream in streams) - min(begun) if begun else 0.0
    rate = (new_tokens - len(begun)) / decode_s if decode_s > 0 else None
    parts = [
        f"{len(streams)} choices" if len(streams) > 1 else "",
        f"{prompt_tokens} prompt and {new_tokens} new tokens",
        f"the first after {first_s:.3f} s" if first_s is not None else "",
        f"longest gap {gap_s:.3f} s" if gap_s is not None else "",
        f"{rate:.1f} tokens/s" if rate is not None else "",
        *_origin(client, request_id),
        f"user {user!r}" if user else "",
        "ended: " + " and ".join(_counted(ending, count, len(streams)) for ending, count in endings.items()),
    ]
    fields = {
        "id": answer.id,
        "choices": len(streams),
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "first_token_s": first_s,
        "longest_gap_s": gap_s,
        "tokens_per_s": rate,
        "client": client,
        "request_id": request_id,
        "user": user,
        "ended": dict(endings),
        "client_gone": CLIENT_LEFT if client_left else None,
    }
    failed = any(stream.last is not None and stream.last.error is not None for stream in streams)
    logger.log(
        logging.WARNING if failed else logging.INFO,
        "%s: %s%s",
        answer.id,
        ", ".join(filter(None, parts)),
        f" ({CLIENT_LEFT})" if client_left else "",
        extra={FIELDS: fields},
    )


def _ending(stream: RequestStream) -> str:
    if stream.last is None:  # the stream was cancelled before its last output
        return "cancelled"
    if stream.last.error is not None:
        return f"error {from_exception(stream.last.error).code}"
    return str(stream.last.finish_reason)


def _counted(ending: str, count: int, of: int) -> str:
    return ending if count == of else f"{count} {ending}"


def log_refusal(
    refusal: ApiError,
    status: int,
    error: Exception,
    *,
    client: str | None = None,
    request_id: str | None = None,
) -> None:
    """Log a refused request at level INFO; at WARNING if the status is 503; at ERROR, with the traceback of
    `error`, if it is 500. `refusal` is what the client is sent."""
    # A name that a client made up may be part of the message: quoted, it can neither end the line nor colour it.
    line = (
        "refused: %d %s: %r%s",
        status,
        refusal.code,
        refusal.message,
        "".join(f", {part}" for part in _origin(client, request_id)),
    )
    fields = {"status": status, "code": refusal.code, "param": refusal.param, "client": client}
    extra = {FIELDS: fields | {"request_id": request_id}}
    if status == 500:
        logger.error(*line, exc_info=error, extra=extra)
    else:
        logger.log(logging.WARNING if status == 503 else logging.INFO, *line, extra=extra)


def log_departure(client: str | None = None, request_id: str | None = None) -> None:
    """Log that a client left before its request was submitted, while its body was read, validated or tokenized."""
    origin = "".join(f", {part}" for part in _origin(client, request_id))
    fields = {"client": client, "request_id": request_id}
    logger.info("dropped: %s before its request was taken in%s", CLIENT_LEFT, origin, extra={FIELDS: fields})


def _origin(client: str | None, request_id: str | None) -> list[str]:
    """Return the parts of a log line that say where a request comes from, so far as it is known."""
    if client is not None and not client.replace(".", "").replace(":", "").isalnum():
        client = repr(client)  # no address: a proxy has passed on a client's own text
    return [f"from {client}"] * bool(client) + [f"request {request_id!r}"] * bool(request_id)


class Pulse:
    """Logs the server's load every `PULSE_EVERY_S` seconds and returns freed memory to the operating system."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._remember()

    async def run(self) -> None:
        while True:
            await asyncio.to_thread(return_freed_memory)
            await asyncio.sleep(PULSE_EVERY_S)
            self.beat()

    def beat(self) -> None:
        """Log one line if requests are running or waiting. Its rates are averages since the last call."""
        latest, waiting = self._engine.latest_step, self._engine.num_waiting()
        if latest.active or waiting:
            seconds = time.monotonic() - self._since_s
            new = (self._engine.requests.generation_tokens - self._new_tokens) / seconds
            prompt = (self._engine.telemetry.counters.prefill_tokens - self._prompt_tokens) / seconds
            kv_use = latest.kv_reserved_tokens / self._engine.facts.config.kv_tokens()
            step_s = self._engine.step_s
            logger.info(
                "%d running, %d waiting; %.1f new and %.1f prompt tokens/s; %.0f %% of the KV memory held%s",
                latest.active,
                waiting,
                new,
                prompt,
                100 * kv_use,
                f"; the present step has taken {step_s:.0f} s" if step_s > PULSE_EVERY_S else "",
                extra={
                    FIELDS: {
                        "running": latest.active,
                        "waiting": waiting,
                        "new_tokens_per_s": new,
                        "prompt_tokens_per_s": prompt,
                        "kv_use": kv_use,
                        "step_s": step_s,
                    }
                },
            )
        self._remember()

    def _remember(self) -> None:
        self._since_s = time.monotonic()
        self._new_tokens = self._engine.requests.generation_tokens
        self._prompt_tokens = self._engine.telemetry.counters.prefill_tokens
