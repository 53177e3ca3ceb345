"""The engine's process: its main thread, and the messages between it and the HTTP process."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import pickle
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch

from common.constrained.allowed_tokens import AllowedTokens
from common.constrained.grammar import Grammar, Matcher
from common.engine.config import EngineConfig
from common.engine.engine import Engine
from common.engine.requests import Phase
from common.engine.scheduling import StepPlan
from common.engine.telemetry import Counters, StepRecord
from common.errors import EngineDeadError, StartupError
from common.hosting.thread import EngineThread
from common.models.config import ModelConfig
from common.observing.frames import Frame
from common.request import Request, SamplingParams, StepOutput
from common.startup.memory import freeze_objects
from kernels.dispatch import Kernels

logger = logging.getLogger(__name__)

LENGTH = struct.Struct("!Q")  # of a message, in bytes


def packed(message: object) -> bytes:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


def receive(link: socket.socket) -> Any:
    """Block until a message has come, and return it. Raises EOFError: the other process has ended."""
    (length,) = LENGTH.unpack(_receive_bytes(link, LENGTH.size))
    return pickle.loads(_receive_bytes(link, length))


def _receive_bytes(link: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = link.recv(min(count - len(data), 2**20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


# ---------------------------------------------------------------------- messages


class Model(NamedTuple):
    """The properties of the engine's model that the HTTP process needs."""

    config: ModelConfig
    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    batch_invariant: bool


class Facts(NamedTuple):
    """The properties of a new engine that its `RemoteEngine` in the HTTP process needs."""

    phase: Phase
    config: EngineConfig
    default_params: SamplingParams
    model: Model
    kernels: Kernels
    has_priorities: bool
    pool_limit: int | None

    @classmethod
    def of(cls, engine: Engine) -> Facts:
        model = Model(*(getattr(engine.model, name) for name in Model._fields))
        limits = engine.has_priorities, engine.pool_limit
        return cls(engine.phase, engine.config, engine.default_params, model, engine.kernels, *limits)


class State(NamedTuple):
    """The engine's state, a part of each message to the HTTP process, except frames of the live view
    (`common.observing.frames`) and answers to `compile`."""

    taken: int = 0  # requests that have left the inbox since the start
    waiting: int = 0  # requests in the scheduler's queue
    queue_room: int = 0  # how many more requests the scheduler's queue can take
    paused: bool = False
    dead: EngineDeadError | None = None


class RemoteMatcher(Matcher):
    """A matcher in the engine's process, as the HTTP process knows it: by its number."""

    def __init__(self, number: int) -> None:
        self.number = number


class NewRequest(NamedTuple):
    """The fields of a request that are sent to the engine's process, which needs no detokenizer."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int]
    cache_salt: str
    matcher: RemoteMatcher | None
    allowed: AllowedTokens | None
    priority: int
    group: str
    prediction: Sequence[int]
    arrived_s: float | None


new_request = operator.attrgetter(*NewRequest._fields)


def _getter(of: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that returns the values of a dataclass's fields; faster than `dataclasses.astuple`."""
    return operator.attrgetter(*(field.name for field in fields(of)))


_output_values, _record_values, _counter_values = map(_getter, (StepOutput, StepRecord, Counters))


def row(output: StepOutput) -> tuple[Any, ...]:
    """Return the values of an output's fields, with an error that can be pickled."""
    if output.error is not None:
        output = replace(output, error=picklable(output.error))
    return _output_values(output)


def picklable(error: BaseException) -> Exception:
    """Return an error that can be pickled: the given one if its class is in `common.errors`, or else a RuntimeError
    with its text."""
    if isinstance(error, Exception) and type(error).__module__ == StartupError.__module__:
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def result_of(outcome: Future[Any]) -> tuple[Any, Exception | None]:
    """Return the result of a completed future and None, or None and the future's error, which can be pickled."""
    error = outcome.exception()
    return (outcome.result(), None) if error is None else (None, picklable(error))


# ---------------------------------------------------------------------- the engine's process


def serve(descriptor: int) -> None:
    """Build and run an engine for the process at the other end of a socket. Does not return.

    Args:
        descriptor: the socket's file descriptor.
    """
    # The front gets these signals, too, and ends this process in good order.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    link = socket.socket(fileno=descriptor)
    with contextlib.suppress(EOFError, OSError):
        make_engine, prepare = receive(link)
        prepare()
        ServingThread(link, make_engine).serve()
    logging.shutdown()
    os._exit(0)  # at once, even while the engine is inside a step: nobody is left to read its outputs


class ServingThread(EngineThread):
    """An engine's thread that gets its requests from the HTTP process, and sends it the outputs.

    Args:
        link: a socket to the HTTP process.
        make_engine: builds the engine; called in the engine's thread.
    """

    def __init__(self, link: socket.socket, make_engine: Callable[[], Engine]) -> None:
        super().__init__(self._make)
        self._link = link
        self._make_from = make_engine
        self._sending = threading.Lock()
        # A thread of the HTTP process waits for each grammar, so few are compiled at a time.
        self._compiling = ThreadPoolExecutor(thread_name_prefix="compiling")
        self._matchers: dict[int, Matcher] = {}  # by number: matchers for requests that are still to come
        self._submitted = 0
        self._sent = State()
        self._record: StepRecord | None = None  # the latest step's, until it is sent

    def serve(self) -> None:
        """Run the engine until the HTTP process sends `stop`. Raises EOFError: the HTTP process has ended."""
        self._thread.start()
        while True:
            kind, *content = receive(self._link)
            if kind == "submit":
                self._submit_new([NewRequest(*each) for each in content[0]])
            elif kind == "cancel":
                self.cancel(*content)
            elif kind == "compile":
                self._compile(*content)
            elif kind == "call":
                self._call(*content)
            elif kind == "abort":
                self.abort(*content)
            else:
                self.stop()
                self.join()
                return

    # ------------------------------------------------------------------ from the front

    def _submit_new(self, requests: Sequence[NewRequest]) -> None:
        made = []
        for new in requests:
            matcher = None if new.matcher is None else self._matchers.pop(new.matcher.number)
            made.append(Request(**new._asdict() | {"matcher": matcher}))
        with self._wakeup:
            self._submitted += len(made)
            self.submit(made)

    def _compile(self, number: int, grammar: Grammar, unused: Sequence[int]) -> None:
        """Compile a grammar, which the HTTP process has checked, in another thread, and keep its matcher here.

        Args:
            number: the number of the new matcher.
            grammar: the grammar.
            unused: numbers of matchers whose requests have come, or will not come any more. They are dropped.
        """
        for each in unused:
            self._matchers.pop(each, None)

        def make() -> tuple[RemoteMatcher, float | None]:
            grammars = self.engine.grammars
            self._matchers[number] = grammars.compile(grammar)
            return RemoteMatcher(number), grammars.compile_s(grammar)

        def answer(outcome: Future[Any]) -> None:
            self._send("compiled", number, *result_of(outcome))

        self._compiling.submit(make).add_done_callback(answer)

    def _call(self, number: int, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> None:
        def answer(outcome: Future[Any]) -> None:
            self._send("answered", self._state(), number, *result_of(outcome))

        self.call(function, *args, **kwargs).add_done_callback(answer)

    # ------------------------------------------------------------------ to the front

    def _make(self) -> Engine:
        """Build and return the engine. Send its facts, or the error if it cannot be built, to the HTTP process."""
        try:
            engine = self._make_from()
        except BaseException as error:
            if not isinstance(error, StartupError):
                logger.exception("the engine could not be built")
                error = StartupError(f"the engine could not be built: {type(error).__name__}: {error}")
            self._send(error, self._sent)
            raise
        engine.plan_watchers.append(self._planned)
        engine.watchers.append(self._stepped)
        freeze_objects()
        room = engine.scheduler.queue_room()
        self._sent = State(queue_room=room)
        self._send(Facts.of(engine), self._sent)
        return engine

    def _state(self) -> State:
        engine = self.engine
        with self._wakeup:
            taken = self._submitted - len(self._arrived)
            scheduler = engine.scheduler
            return State(taken, scheduler.num_waiting, scheduler.queue_room(), engine.paused, engine.dead)

    def _planned(self, plan: StepPlan) -> None:
        begun = [chunk.request.request_id for chunk in plan.prefill if chunk.is_first]
        self._sent = self._state()
        self._send("planned", self._sent, time.monotonic(), begun)

    def _stepped(self, record: StepRecord, _: StepPlan, __: Sequence[StepOutput]) -> None:
        self._record = record

    def _hand_back(self, outputs: list[StepOutput]) -> None:
        state, record = self._state(), self._record
        if not outputs and record is None and state == self._sent:
            return
        self._sent, self._record = state, None
        step = None
        if record is not None:
            telemetry = self.engine.telemetry
            step = _record_values(record), _counter_values(telemetry.counters), telemetry.accepted_at
        self._send("stepped", state, [row(output) for output in outputs], step, self._next_begins_s())

    def _next_begins_s(self) -> float | None:
        """Return `time.monotonic()` if the next step begins now; None if the thread is going to wait for work."""
        return time.monotonic() if self.engine.is_due else None

    def _turn(self) -> bool:
        stopping = super()._turn()
        self._hand_back([])
        return stopping

    def _publish_frame(self, frame: Frame | None) -> None:
        self._send("frame", frame)

    def _send(self, *message: object) -> None:
        # OSError: the front has ended, and the main thread ends this process.
        with self._sending, contextlib.suppress(OSError):
            self._link.sendall(packed(message))
