"""Where steps compute: work is handed in, done in that order, and waited for later.

```text
host     submit t   submit t+1         wait t        submit t+2        wait t+1
stream     └─ t ────────┴─ t+1 ──────────┴───────────────┴─ t+2 ─ …
```

Work is a function of tensors that returns tensors. Its last argument list changes from step to step; what else it
reads and writes (weights, KV memory, the latest tokens) stays where it is.

| | who computes | what the host's Python costs it |
| --- | --- | --- |
| `TapeStream` | a thread of C++ that plays recordings (`kernels.tape`) | nothing: it never asks for the lock |
| `ThreadStream` | a thread of Python | a wait for the interpreter's lock between any two operators |
| `CudaStream` | the GPU | nothing, as long as it has work |
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from kernels.tape import Function, Tape, record

T = TypeVar("T")


class Pending(ABC):
    """Work that was handed in."""

    @abstractmethod
    def done(self, within_s: float = 0.0) -> bool:
        """Whether `wait` would return, or raise, at once: now, or within some seconds."""

    @abstractmethod
    def wait(self) -> tuple[Tensor, ...]:
        """What the work returned, on the host if that is to read it. Waits for this work and for none after it.

        Raises:
            Exception: what the work raised.
        """


class Stream(ABC):
    """Does what it is given, one after the other."""

    @abstractmethod
    def submit(
        self,
        key: Hashable,
        function: Function,
        inputs: Sequence[Tensor],
        after: Pending | None = None,
        *,
        fetch: bool = True,
    ) -> Pending:
        """Hand in `function(*inputs)`.

        Args:
            key: equal only for functions that do the same to other inputs: one of them may be called for all.
            function: calls operators, names no sizes and reads no number.
            inputs: not to be changed until the work is done.
            after: earlier work that nobody waits for: what it returns comes before `inputs`.
            fetch: whether the host will read what it returns.
        """

    def entered(self) -> AbstractContextManager[object]:
        """Inside it, what is made for work that will be handed in is made where that work will find it."""
        return nullcontext()

    @abstractmethod
    def call(self, function: Callable[[], T]) -> T:
        """What any function returns, called where the stream computes, when all that was handed in is done."""

    def aside(self, function: Callable[[], T]) -> T:
        """The same for a function of what is done already: it need not wait for what is not."""
        return self.call(function)


def open_stream(device: torch.device, *, recorded: bool) -> Stream:
    """A stream for work on `device`; `recorded`: on a CPU, the work can be recorded, and is to be."""
    if device.type == "cuda":
        return CudaStream(device)
    return TapeStream() if recorded else ThreadStream()


def call_apart(function: Callable[[], T]) -> T:
    """What `function` returns, called in a thread that ends with it.

    With it end the workers that libgomp keeps for every thread that has ever shared out an operator: they would
    stand in the way of those of the thread that computes.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="apart")
    thread.start()
    thread.join()
    return outcome.result()


# ---------------------------------------------------------------------- a CPU, by tapes


class _Played(Pending):
    def __init__(self, player: Any, ticket: int) -> None:
        self.ticket = ticket
        self._player = player
        self._outcome: tuple[Tensor, ...] | Exception | None = None

    def done(self, within_s: float = 0.0) -> bool:
        return self._outcome is not None or bool(self._player.is_done(self.ticket, within_s))

    def wait(self) -> tuple[Tensor, ...]:
        if self._outcome is None:  # the player tells once
            try:
                self._outcome = tuple(self._player.wait(self.ticket))
            except Exception as error:
                self._outcome = error
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class Done(Pending):
    """Work that was done while it was handed in."""

    def __init__(self, outputs: tuple[Tensor, ...]) -> None:
        self._outputs = outputs

    def done(self, within_s: float = 0.0) -> bool:  # noqa: ARG002 - it is
        return True

    def wait(self) -> tuple[Tensor, ...]:
        return self._outputs


class TapeStream(Stream):
    """Records each kind of work when it first comes, and plays it from then on."""

    def __init__(self) -> None:
        self._player = torch.classes.infer.TapePlayer()
        self._tapes: dict[Hashable, Tape] = {}

    def submit(
        self,
        key: Hashable,
        function: Function,
        inputs: Sequence[Tensor],
        after: Pending | None = None,
        *,
        fetch: bool = True,  # noqa: ARG002 - it is on the host
    ) -> Pending:
        if after is not None and not isinstance(after, _Played):
            inputs, after = [*after.wait(), *inputs], None
        if key not in self._tapes:
            given = list(inputs) if after is None else [*after.wait(), *inputs]
            self._tapes[key], outputs = self.call(lambda: record(function, *given))
            return Done(outputs)
        ticket = self._player.submit(
            self._tapes[key].recorded, list(inputs), 0 if after is None else after.ticket
        )
        return _Played(self._player, ticket)

    def call(self, function: Callable[[], T]) -> T:
        self._player.drain()
        return call_apart(function)

    def set_threads(self, threads: int) -> None:
        """How many threads share what is handed in from now on."""
        self._player.set_threads(threads)

    def take_times(self) -> list[tuple[int, float, float]]:
        """Ticket, beginning and end of the work done since the last call, on the clock of `time.monotonic`."""
        return [(int(ticket), began, ended) for ticket, began, ended in self._player.take_times().tolist()]

    def aside(self, function: Callable[[], T]) -> T:
        """In this thread, alone: helpers would be workers of its own."""
        threads = torch.ops.infer.set_threads_here(1)
        try:
            return function()
        finally:
            torch.ops.infer.set_threads_here(threads)


# ---------------------------------------------------------------------- a CPU, by Python


class _Called(Pending):
    def __init__(self, future: Future[tuple[Tensor, ...]]) -> None:
        self.future = future

    def done(self, within_s: float = 0.0) -> bool:
        return bool(futures.wait([self.future], within_s).done)

    def wait(self) -> tuple[Tensor, ...]:
        return self.future.result()


class ThreadStream(Stream):
    """Calls the functions themselves, from a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stream")

    def submit(
        self,
        key: Hashable,  # noqa: ARG002 - nothing is recorded
        function: Function,
        inputs: Sequence[Tensor],
        after: Pending | None = None,
        *,
        fetch: bool = True,  # noqa: ARG002 - it is on the host
    ) -> Pending:
        def run() -> tuple[Tensor, ...]:
            with torch.inference_mode():
                return function(*(() if after is None else after.wait()), *inputs)

        return _Called(self._thread.submit(run))

    def call(self, function: Callable[[], T]) -> T:
        return self._thread.submit(function).result()


# ---------------------------------------------------------------------- a GPU


class _Launched(Pending):
    """Kernels on their way; if the host is to read what they give, a copy behind them, on a stream of copies."""

    def __init__(self, outputs: tuple[Tensor, ...], copies: torch.cuda.Stream | None) -> None:
        self.outputs = outputs
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._ready.record()
        if copies is None:
            return
        with torch.cuda.stream(copies):
            copies.wait_event(
                self._ready
            )  # for this work alone: what is launched behind it is not waited for
            self.outputs = tuple(output.to("cpu", non_blocking=True) for output in outputs)
            for output in outputs:
                output.record_stream(copies)
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._ready.record()

    def done(self, within_s: float = 0.0) -> bool:
        deadline = time.monotonic() + within_s
        # An event is waited for without limit, or asked.
        while not self._ready.query():  # type: ignore[no-untyped-call]
            if time.monotonic() >= deadline:
                return False
            time.sleep(1e-3)
        return True

    def wait(self) -> tuple[Tensor, ...]:
        self._ready.synchronize()
        return self.outputs


class CudaStream(Stream):
    """One stream for all kernels, one for copies to the host. Kernels are launched from Python."""

    def __init__(self, device: torch.device) -> None:
        self._compute = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._compute.wait_stream(torch.cuda.default_stream(device))  # which has loaded the weights

    def submit(
        self,
        key: Hashable,  # noqa: ARG002 - nothing is recorded
        function: Function,
        inputs: Sequence[Tensor],
        after: Pending | None = None,
        *,
        fetch: bool = True,
    ) -> Pending:
        with self.entered(), torch.inference_mode():
            before = after.outputs if isinstance(after, _Launched) else ()
            return _Launched(function(*before, *inputs), self._copies if fetch else None)

    def entered(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._compute)

    def call(self, function: Callable[[], T]) -> T:
        with self.entered():
            outcome = function()
        self._compute.synchronize()
        return outcome

    def aside(self, function: Callable[[], T]) -> T:
        with torch.cuda.stream(self._copies):
            return function()
