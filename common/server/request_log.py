"""A line in the log for each request, at its end or when it is refused. Neither prompts nor answers are in it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from common.server.errors import ApiError, from_exception
from common.server.log_format import FIELDS
from common.server.transport import CLIENT_LEFT
from common.server.wire.format import Answer
from common.worker import RequestStream

logger = logging.getLogger(__name__)


def log_end(
    answer: Answer,
    streams: Sequence[RequestStream],
    *,
    asked_s: float,
    client: str | None = None,
    user: str | None = None,
    request_id: str | None = None,
    client_gone: str | None = None,
) -> None:
    """Say how an answer went, all its choices in one line.

    Args:
        answer: whose choices `streams` are, in order.
        asked_s: when the request had come, on `time.monotonic`'s clock.
        client: the address that it came from.
        user: the client's own label.
        request_id: what the client calls its request, if it does.
        client_gone: why nobody takes the answer any more; None if somebody does.
    """
    prompts = {
        id(choice.prompt): stream.request.num_prompt_tokens
        for choice, stream in zip(answer.choices, streams, strict=True)
    }
    begun = [stream.first_token_s for stream in streams if stream.first_token_s is not None]
    endings = Counter(_ending(stream) for stream in streams)
    prompt_tokens, new_tokens = sum(prompts.values()), sum(stream.received_tokens for stream in streams)
    first_s = min(begun) - asked_s if begun else None
    gap_s = max(stream.longest_gap_s for stream in streams) if begun else None
    # Of the time in which tokens came: how long the first took is said apart.
    decode_s = max(stream.latest_token_s for stream in streams) - min(begun) if begun else 0.0
    rate = (new_tokens - len(begun)) / decode_s if decode_s > 0 else None
    parts = [
        f"{len(streams)} choices" if len(streams) > 1 else "",
        f"{prompt_tokens} prompt and {new_tokens} new tokens",
        f"the first after {first_s:.3f} s" if first_s is not None else "",
        f"longest gap {gap_s:.3f} s" if gap_s is not None else "",
        f"{rate:.1f} tokens/s" if rate is not None else "",
        f"from {client}" if client else "",
        f"request {request_id!r}" if request_id else "",
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
        "client_gone": client_gone,
    }
    failed = any(stream.last is not None and stream.last.error is not None for stream in streams)
    logger.log(
        logging.WARNING if failed else logging.INFO,
        "%s: %s%s",
        answer.id,
        ", ".join(filter(None, parts)),
        f" ({client_gone})" if client_gone else "",
        extra={FIELDS: fields},
    )


def _ending(stream: RequestStream) -> str:
    if stream.last is None:  # its reader stopped before
        return "cancelled"
    if stream.last.error is not None:
        return f"error {from_exception(stream.last.error).code}"
    return str(stream.last.finish_reason)


def _counted(ending: str, count: int, of: int) -> str:
    return ending if count == of else f"{count} {ending}"


def log_refusal(refusal: ApiError, status: int, error: Exception, *, client: str | None = None) -> None:
    """Say what a request was refused with: mistakes of a client's are news, a server that cannot is a warning.

    Args:
        refusal: what the client is told.
        status: with which HTTP status.
        error: what was raised; shown whole where the client is told nothing of it.
        client: the address that the request came from.
    """
    # A name that a client made up may be part of the message: quoted, it can neither end the line nor colour it.
    line = (
        "refused: %d %s: %r%s",
        status,
        refusal.code,
        refusal.message,
        f", from {client}" if client else "",
    )
    extra = {FIELDS: {"status": status, "code": refusal.code, "param": refusal.param, "client": client}}
    if status == 500:
        logger.error(*line, exc_info=error, extra=extra)
    else:
        logger.log(logging.WARNING if status == 503 else logging.INFO, *line, extra=extra)


def log_departure(client: str | None = None) -> None:
    """Say that a request was given up before the engine had it: while it was read, queued or tokenized."""
    logger.info(
        "dropped: %s before its request was taken in%s", CLIENT_LEFT, f", from {client}" if client else ""
    )
