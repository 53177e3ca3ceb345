"""Errors that cross a boundary: from the engine to a server, from a start-up check to a terminal."""

from __future__ import annotations


class StartupError(Exception):
    """Serving cannot begin: one line that says what is wrong and how to mend it."""


class InvalidRequestError(ValueError):
    """A request this engine can never serve; `param` names the field at fault."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidPromptError(InvalidRequestError):
    """The prompt is empty, or names tokens that do not exist."""


class InvalidGrammarError(InvalidRequestError):
    """There is no such grammar, nothing matches it, or it is too much to compile."""


class GrammarFailedError(RuntimeError):
    """A grammar could not be followed to the end of an answer."""


class QueueFullError(RuntimeError):
    """Too many requests wait already; try again later."""


class RequestTimeoutError(RuntimeError):
    """This request was not done in the time that a request may take."""

    @classmethod
    def after(cls, timeout_s: float) -> RequestTimeoutError:
        return cls(f"not done within {timeout_s:g} s, the most this server gives a request")


class EngineDeadError(RuntimeError):
    """The device failed in a way that leaves its state unknown: the process must be restarted."""


class ShuttingDownError(RuntimeError):
    """The server stopped before this request was finished."""


class NaNLogitsError(ArithmeticError):
    """The model's logits for this request were not numbers."""
