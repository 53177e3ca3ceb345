"""Errors that users see: in a server's reply, or in the terminal at start-up."""

from __future__ import annotations


class StartupError(Exception):
    """Serving, or a measurement, cannot begin. The message says why and, where it can, what to do.

    It is one line. In benchmarks and the tutor, lines that another process has printed may follow.
    """


class InvalidRequestError(ValueError):
    """This engine cannot serve the request. `param` names the field at fault; None: no field is named."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidPromptError(InvalidRequestError):
    """The prompt is empty, or names tokens that do not exist."""


class ContextLengthError(InvalidRequestError):
    """A prompt, or a prompt and its new tokens, are longer than a request may be."""


class InvalidGrammarError(InvalidRequestError):
    """The grammar cannot be used. For example, it is malformed, matches no text, or takes too much time."""


class GrammarFailedError(RuntimeError):
    """A request's grammar failed while its answer was generated."""


class NoTokenLeftError(RuntimeError):
    """No token could be sampled for a request: its fields forbid all tokens that could come next."""


class QueueFullError(RuntimeError):
    """The queue of waiting requests has no room for the new requests. Try again later."""

    @classmethod
    def of(cls, limit: int, count: int) -> QueueFullError:
        """Return the error that refuses `count` requests: a queue for at most `limit` has no room for them."""
        return cls(
            f"the queue, which holds {limit} requests (the server's option --max-waiting-requests), has no room "
            f"for {count} more; try again shortly"
        )


class RequestTimeoutError(RuntimeError):
    """The request was not finished within `request_timeout`."""

    @classmethod
    def after(cls, timeout_s: float) -> RequestTimeoutError:
        return cls(f"not done within {timeout_s:g} s, the most this server gives a request")


class EngineDeadError(RuntimeError):
    """The engine ended, and the server must be restarted. The device's or the engine's state is unknown, or the
    engine's process has ended."""


class ShuttingDownError(RuntimeError):
    """The server is stopping, so this request is refused, or fails unfinished."""


class NaNLogitsError(ArithmeticError):
    """The model's logits for this request hold a NaN, or are all minus infinity."""
