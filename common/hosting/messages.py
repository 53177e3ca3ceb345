"""The messages between the server's process and the engine's: dataclasses, pickled.

```text
server's process  ── Submit, Cancel, Call, Compile, Abort, Stop ──────────────────>  engine's process
                 <── Built, then Planned, Stepped, Answered, Shown; or NotBuilt ──
```
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from typing import Any

from common.constrained.grammar import Grammar
from common.engine.requests import EngineFacts
from common.engine.telemetry import Counters, StepRecord
from common.errors import EngineDeadError, StartupError
from common.observing.frames import Frame
from common.request import FinishReason, Request, StepOutput

# ---------------------------------------------------------------------- to the engine's process


#: The arguments of `Request` that are sent. The engine's process needs no detokenizer: the server's makes the text.
SENT = tuple(each.name for each in fields(Request) if each.init and each.name != "detokenizer")


@dataclass(slots=True)
class Submit:
    """Submits requests, each as its arguments `SENT`. The `matcher` among them is the number of the grammar's
    matcher (`Compile`); None: the request has no grammar."""

    requests: list[dict[str, Any]]


@dataclass(slots=True)
class Cancel:
    request_id: str
    reason: FinishReason


@dataclass(slots=True)
class Call:
    """Asks to call a method of `EngineCalls` between two steps."""

    number: int  # the `Answered` has the same
    method: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(slots=True)
class Compile:
    """Asks to compile a grammar that was checked. The matcher stays in the engine's process."""

    number: int  # the `Answered` has the same, and it is the matcher's number
    grammar: Grammar
    unused: list[int]  # numbers of matchers whose requests have come, or will not come any more


@dataclass(slots=True)
class Abort:
    """Asks to fail every request, after the present step."""

    error: Exception


@dataclass(slots=True)
class Stop:
    """Asks the process to end, after the present step."""


# ---------------------------------------------------------------------- from the engine's process


@dataclass(frozen=True, slots=True)
class EngineState:
    """The engine's state between two steps, as far as the server's process has to know it."""

    taken: int = 0  # requests that were received since the start
    waiting: int = 0  # requests in the scheduler's queue
    queue_room: int = 0  # how many more requests the scheduler's queue can take
    paused: bool = False
    dead: EngineDeadError | None = None


@dataclass(slots=True)
class Built:
    facts: EngineFacts
    state: EngineState


@dataclass(slots=True)
class NotBuilt:
    error: StartupError


@dataclass(slots=True)
class Planned:
    """A step begins that computes the first tokens of requests, or that the server's process does not expect."""

    state: EngineState
    began_s: float  # on the clock of `time.monotonic`
    begun: list[str]  # ids of the requests whose first tokens it computes


@dataclass(slots=True)
class Stepped:
    """The outputs of a step, or only a new state.

    Attributes:
        outputs: their texts are empty.
        record: the step's record; None: no step has ended.
        next_began_s: when the next step began, if it began at once, on the clock of `time.monotonic`; None: the
            engine waits for work.
    """

    state: EngineState
    outputs: list[StepOutput]
    record: StepRecord | None
    counters: Counters
    accepted_at: list[int]
    next_began_s: float | None


@dataclass(slots=True)
class Answered:
    """The result of a `Call`, or the seconds of processor time of a `Compile`."""

    number: int
    result: Any
    error: Exception | None
    state: EngineState | None  # None: the answer comes from another thread than the engine's


@dataclass(slots=True)
class Shown:
    """A frame of the live view; None: making frames has failed for good."""

    frame: Frame | None


ToEngine = Submit | Cancel | Call | Compile | Abort | Stop
FromEngine = Planned | Stepped | Answered | Shown

# ---------------------------------------------------------------------- pickles


def send(connection: Connection, message: object) -> None:
    """Raises OSError: the other process has ended."""
    connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    """Block until a message has come, and return it. Raises EOFError or OSError: the other process has ended."""
    return pickle.loads(connection.recv_bytes())


def picklable(error: BaseException) -> Exception:
    """Return an error that can be pickled: the given one if its class is in `common.errors`, or else a RuntimeError
    with its text."""
    if isinstance(error, Exception) and type(error).__module__ == StartupError.__module__:
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
