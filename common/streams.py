"""Where steps compute: work is handed in, done in that order, and waited for later.

```text
host     submit t   submit t+1         wait t        submit t+2        wait t+1
stream     └─ t ────────┴─ t+1 ──────────┴───────────────┴─ t+2 ─ …
```

Work is a function of tensors that returns tensors. Its last argument list changes from step to step; what else it
reads and writes (weights, KV memory, the latest tokens) stays where it is.

| stream | who computes | what the host's Python costs it |
| --- | --- | --- |
| `TapeStream` | a thread of C++ that plays recordings (`kernels.tape`) | nothing: it never asks for the lock |
| `ThreadStream` | a thread of Python | a wait for the interpreter's lock between any two operators |
| `CudaStream` | the GPU | nothing, as long as it has work; launching is cheap where a graph is |
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from common.work_times import MOST_TIMES, DeviceTimes, HostTimes, Work
from kernels.tape import Function, Tape, record

logger = logging.getLogger(__name__)

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
        by_row: bool = False,
    ) -> Pending:
        """Hand in `function(*inputs)`.

        Args:
            key: equal only for functions that do the same to other inputs: one of them may be called for all.
            function: calls operators, names no sizes and reads no number.
            inputs: not to be changed until the work is done.
            after: earlier work that nobody waits for: what it returns comes before `inputs`.
            fetch: whether the host will read what it returns.
            by_row: row i of what it returns comes of row i of its inputs, which lie on the host: a recording that
                holds for one number of rows may be given more than are wanted.
        """

    def entered(self) -> AbstractContextManager[object]:
        """Context manager: tensors created inside it live on the stream that runs the submitted work."""
        return nullcontext()

    @abstractmethod
    def call(self, function: Callable[[], T]) -> T:
        """Run a function where the stream computes, after all submitted work. Returns what it returns."""

    def aside(self, function: Callable[[], T]) -> T:
        """Like `call`, for functions that touch finished work only. A stream that can run them without waiting for
        pending work does so."""
        return self.call(function)

    @abstractmethod
    def drain(self) -> None:
        """Block until nothing computes: no submitted work, and no `call` that was interrupted while it waited."""

    def time_work(self, wanted: bool) -> None:  # noqa: B027 - one that cannot tell has nothing to prepare
        """Whether `take_times` is going to be asked."""

    def take_times(self) -> list[Work]:
        """What was done since the last call, in that order; the latest `MOST_TIMES` at the most."""
        return []


def open_stream(device: torch.device, *, recorded: bool) -> Stream:
    """A stream for work on `device`; `recorded`: the work can be recorded, and is to be."""
    if device.type == "cuda":
        return CudaStream(device, recorded=recorded)
    return TapeStream() if recorded else ThreadStream()


def call_apart(function: Callable[[], T]) -> T:
    """Run a function in a thread of its own that ends with it. Returns what the function returns.

    libgomp keeps a pool of workers for every thread that has computed. That pool ends with the thread, so it does
    not compete with the pool of the thread that computes from then on.
    """
    apart = _Apart(function)
    apart.thread.join()
    return apart.outcome.result()


class _Apart(Generic[T]):
    """A function in a thread of its own, and what will become of it."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.outcome: Future[T] = Future()
        self.thread = threading.Thread(target=self._run, args=(function,), name="apart")
        self.thread.start()

    def _run(self, function: Callable[[], T]) -> None:
        try:
            self.outcome.set_result(function())
        except BaseException as error:
            self.outcome.set_exception(error)


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
        self.outputs = outputs

    def done(self, within_s: float = 0.0) -> bool:  # noqa: ARG002 - it is
        return True

    def wait(self) -> tuple[Tensor, ...]:
        return self.outputs


class TapeStream(Stream):
    """Records each kind of work when it first comes, and plays it from then on."""

    def __init__(self) -> None:
        self._player = torch.classes.infer.TapePlayer()
        self._tapes: dict[Hashable, Tape] = {}
        self._keys: deque[tuple[int, Hashable]] = deque(maxlen=MOST_TIMES)  # of tickets
        self._apart: _Apart[Any] | None = None  # a `call` that may not have ended

    def submit(
        self,
        key: Hashable,
        function: Function,
        inputs: Sequence[Tensor],
        after: Pending | None = None,
        *,
        fetch: bool = True,  # noqa: ARG002 - it is on the host
        by_row: bool = False,  # noqa: ARG002 - any number of rows will do
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
        self._keys.append((ticket, key))
        return _Played(self._player, ticket)

    def call(self, function: Callable[[], T]) -> T:
        self.drain()
        self._apart = apart = _Apart(function)
        self.drain()
        return apart.outcome.result()

    def drain(self) -> None:
        self._player.drain()
        if self._apart is not None:
            self._apart.thread.join()
            self._apart = None

    def set_threads(self, threads: int) -> None:
        """How many threads share what is handed in from now on."""
        self._player.set_threads(threads)

    def time_work(self, wanted: bool) -> None:  # noqa: ARG002 - the player looks at its clock anyway
        self.take_times()  # what is old

    def take_times(self) -> list[Work]:
        keys = dict(self._keys)
        times = self._player.take_times().tolist()
        return [Work(keys[ticket], began, ended) for ticket, began, ended in times if ticket in keys]

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
        self._times: HostTimes | None = None

    def submit(
        self,
        key: Hashable,
        function: Function,
        inputs: Sequence[Tensor],
        after: Pending | None = None,
        *,
        fetch: bool = True,  # noqa: ARG002 - it is on the host
        by_row: bool = False,  # noqa: ARG002 - any number of rows will do
    ) -> Pending:
        def run() -> tuple[Tensor, ...]:
            with torch.inference_mode():
                return function(*(() if after is None else after.wait()), *inputs)

        return _Called(self._thread.submit(run if self._times is None else self._times.timed(key, run)))

    def call(self, function: Callable[[], T]) -> T:
        return self._thread.submit(function).result()

    def drain(self) -> None:
        self._thread.submit(lambda: None).result()

    def time_work(self, wanted: bool) -> None:
        self._times = HostTimes() if wanted else None

    def take_times(self) -> list[Work]:
        return [] if self._times is None else self._times.take()


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


#: Rows of a captured graph. A graph holds for one number of them; missing ones are copies of the first.
CAPTURED_ROWS = (1, 2, 4, 8, *range(16, 257, 16))


def graph_sizes(sequences: int) -> list[int]:
    """Return the sizes of the graphs that passes over up to so many sequences use, smallest first.

    The last one has a row for each of them, unless that is beyond the largest size there is.
    """
    last = next((size for size in CAPTURED_ROWS if size >= sequences), CAPTURED_ROWS[-1])
    return [size for size in CAPTURED_ROWS if size <= last]


class _Graph:
    """A function's kernels, captured with where their inputs lie: launched as one.

    Args:
        memory: which graphs share, since one runs at a time: what they return stays held, and apart.
    """

    def __init__(self, function: Function, inputs: Sequence[Tensor], memory: Any) -> None:
        self._inputs = [each.clone() for each in inputs]
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        # Other threads may go on using the device meanwhile.
        with torch.cuda.graph(self._graph, memory, stream, capture_error_mode="thread_local"):
            self._outputs = function(*self._inputs)

    def replay(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What the function returns, good until the next replay."""
        for kept, given in zip(self._inputs, inputs, strict=True):
            kept.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._outputs


class CudaStream(Stream):
    """One stream for all kernels, one for copies to the host.

    Kernels are launched from Python, some hundred a pass; those of work by rows, where that is wanted, as a graph.
    What builds on such work must be handed in before more of it: a graph returns its results in one place.

    Attributes:
        captures: whether work by rows becomes graphs; not after a capture has failed.
    """

    def __init__(self, device: torch.device, *, recorded: bool) -> None:
        self.captures = recorded
        self._device = device
        self._compute = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._compute.wait_stream(torch.cuda.default_stream(device))  # which has loaded the weights
        self._graphs: dict[Hashable, _Graph] = {}
        self._memory: Any = None
        self._times: DeviceTimes | None = None

    def submit(
        self,
        key: Hashable,
        function: Function,
        inputs: Sequence[Tensor],
        after: Pending | None = None,
        *,
        fetch: bool = True,
        by_row: bool = False,
    ) -> Pending:
        with self.entered(), torch.inference_mode(), self._timing(key):
            if by_row:
                outputs = self._by_row(key, function, inputs)
            else:
                before = after.outputs if isinstance(after, _Launched | Done) else ()
                outputs = function(*before, *inputs)
            return _Launched(outputs, self._copies if fetch else None)

    def _by_row(self, key: Hashable, function: Function, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        count = len(inputs[0])
        size = next((size for size in CAPTURED_ROWS if size >= count), None)
        if size is None or not self.captures:
            return function(*self._moved(inputs))
        filled = self._moved(
            [torch.cat([each, each[:1].expand(size - count, *each.shape[1:])]) for each in inputs]
        )
        graph = self._graphs.get((key, size))
        outputs = function(*filled) if graph is None else graph.replay(filled)
        if graph is None:  # the call has compiled and opened all that a capture must find done
            self._capture(key, size, function, filled)
        return tuple(output[:count] for output in outputs)

    def _capture(self, key: Hashable, size: int, function: Function, inputs: Sequence[Tensor]) -> None:
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        try:
            self._graphs[key, size] = _Graph(function, inputs, self._memory)
        except RuntimeError as error:
            self.captures = False
            logger.warning("steps cannot be captured here, their kernels are launched one by one: %s", error)

    def _moved(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        return [each.pin_memory().to(self._device, non_blocking=True) for each in inputs]

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

    def drain(self) -> None:
        self._compute.synchronize()

    def time_work(self, wanted: bool) -> None:
        with self.entered():
            self._times = DeviceTimes() if wanted else None

    def take_times(self) -> list[Work]:
        return [] if self._times is None else self._times.take()

    def _timing(self, key: Hashable) -> AbstractContextManager[object]:
        return nullcontext() if self._times is None else self._times.around(key)
