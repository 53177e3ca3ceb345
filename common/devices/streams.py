"""Streams run the passes from phase 9 on: the host submits work, which runs in order, and waits for it later.

```text
host     submit t   submit t+1         wait t        submit t+2        wait t+1
stream     └─ t ────────┴─ t+1 ──────────┴───────────────┴─ t+2 ─ …
```

Work is a function of tensors that returns tensors. Its inputs change from step to step. The other tensors it reads
and writes (weights, KV memory, the latest tokens) stay at their addresses.

| stream | runs on | slowed by Python on the host |
| --- | --- | --- |
| `TapeStream` | a C++ thread that plays recordings (`kernels.tape`) | no: it never takes the interpreter's lock |
| `ThreadStream` | a Python thread | waits for the interpreter's lock between any two operators |
| `CudaStream` | the GPU | not while it has work queued; a captured graph is cheap to launch |
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from common.devices.graphs import CudaGraph, Graphs
from common.devices.work_times import MOST_TIMES, DeviceTimes, HostTimes, Work
from kernels.tape import Function, Tape, record

T = TypeVar("T")


class Pending(ABC):
    """Work that was submitted to a stream."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether the work has ended."""

    @abstractmethod
    def wait(self) -> tuple[Tensor, ...]:
        """Block until the work has ended. Returns its results, on the host if it was submitted with `fetch`.

        Does not wait for work that was submitted later.

        Raises:
            Exception: any error that the work raised.
        """

    def end(self) -> None:
        """Block until the work has ended, whether it failed or not."""
        with suppress(Exception, SystemExit):  # the work's errors; a Ctrl-C in this thread is raised
            self.wait()


class Stream(ABC):
    """Runs submitted work in order."""

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
        """Submit `function(*inputs)`. Returns the pending work. May block while a new key is recorded or captured.

        Args:
            key: names the function. Functions with equal keys must compute the same: a recording of one of them is
                played for all.
            function: calls operators only. It must not depend on sizes or read values from the device.
            inputs: must not change until the work is done.
            after: work submitted earlier; None with `by_row`. Its results are passed to the function before
                `inputs`. The host does not wait for them, unless it records the function.
            fetch: whether the host will read the results. If so, they are copied to the host.
            by_row: row i of each result depends on row i of the inputs alone, and the inputs are on the host. The
                stream may then add rows, to fit a graph that was captured for a fixed number of rows.
        """

    def entered(self) -> AbstractContextManager[object]:
        """Context manager: tensors created inside it live on the stream that runs the submitted work."""
        return nullcontext()

    @abstractmethod
    def call(self, function: Callable[[], T]) -> T:
        """Run a function that computes. Its computation begins after all submitted work, and has ended when this
        method returns the function's result."""

    def aside(self, function: Callable[[], T]) -> T:
        """Like `call`, for functions that touch finished work only. A stream that can run them without waiting for
        pending work does so."""
        return self.call(function)

    @abstractmethod
    def drain(self) -> None:
        """Block until all submitted work has ended, and also the function of a `call` that was interrupted."""

    def time_work(self, wanted: bool) -> None:  # noqa: B027 - a stream without timing has nothing to prepare
        """Start or stop timing the work, for `take_times`."""

    def take_times(self) -> list[Work]:
        """Return the names and times of the work that has ended since the last call, in order: at most the latest
        `MOST_TIMES`. Empty if the stream does not time its work."""
        return []


def open_stream(
    device: torch.device, *, recorded: bool, graph_sizes: Sequence[int] = (), threads: int = 1
) -> Stream:
    """Return a stream for work on `device`.

    Args:
        device: where the work computes.
        recorded: on a CPU, whether the stream records the work and plays the recordings.
        graph_sizes: on a GPU, the numbers of rows for which the stream captures work.
        threads: see `TapeStream`.
    """
    if device.type == "cuda":
        return CudaStream(device, graph_sizes)
    return TapeStream(threads) if recorded else ThreadStream()


def call_apart(function: Callable[[], T]) -> T:
    """Run a function in a new thread, which ends with the function. Returns the function's result.

    libgomp keeps a pool of workers for every thread that has called large operators of torch. That pool ends with
    the thread, so it does not compete with the pool of the thread that computes from then on.
    """
    apart = _Apart(function)
    apart.thread.join()
    return apart.outcome.result()


class _Apart(Generic[T]):
    """Runs a function in a thread of its own.

    Attributes:
        outcome: the function's result or error.
        thread: the thread.
    """

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

    def done(self) -> bool:
        return self._outcome is not None or bool(self._player.is_done(self.ticket, 0.0))

    def wait(self) -> tuple[Tensor, ...]:
        if self._outcome is None:  # the player returns a result only once
            try:
                self._outcome = tuple(self._player.wait(self.ticket))
            except Exception as error:
                self._outcome = error
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class Done(Pending):
    """Work that had ended when `submit` returned.

    Args:
        outputs: its results.
    """

    def __init__(self, outputs: tuple[Tensor, ...]) -> None:
        self.outputs = outputs

    def done(self) -> bool:
        return True

    def wait(self) -> tuple[Tensor, ...]:
        return self.outputs


class TapeStream(Stream):
    """A CPU's stream: records work the first time its key is submitted, and plays the recording from then on.

    Args:
        threads: how many threads compute the work.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._player = torch.classes.infer.TapePlayer()
        self._tapes: dict[Hashable, Tape] = {}
        self._keys: deque[tuple[int, Hashable]] = deque(maxlen=MOST_TIMES)  # latest work: its ticket and key
        self._apart: _Apart[Any] | None = None  # a `call` that may still run

    def submit(
        self,
        key: Hashable,
        function: Function,
        inputs: Sequence[Tensor],
        after: Pending | None = None,
        *,
        fetch: bool = True,  # noqa: ARG002 - results are on the host anyway
        by_row: bool = False,  # noqa: ARG002 - work runs with any number of rows
    ) -> Pending:
        if after is not None and not isinstance(after, _Played):
            inputs, after = [*after.wait(), *inputs], None
        if key not in self._tapes:
            given = list(inputs) if after is None else [*after.wait(), *inputs]
            self._tapes[key], outputs = self.call(lambda: record(function, *given))
            return Done(outputs)
        ticket = self._player.submit(
            self._tapes[key].recorded,
            list(inputs),
            0 if after is None else after.ticket,
            self.threads,
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

    def time_work(self, wanted: bool) -> None:  # noqa: ARG002 - the player always takes times
        self.take_times()  # drops old times

    def take_times(self) -> list[Work]:
        keys = dict(self._keys)
        times = self._player.take_times().tolist()
        return [Work(keys[ticket], began, ended) for ticket, began, ended in times if ticket in keys]

    def aside(self, function: Callable[[], T]) -> T:
        """Run a function in the calling thread, on one core: more threads would be taken from the pass.

        Does not wait for pending work.
        """
        threads = torch.ops.infer.set_threads_here(1)
        try:
            return function()
        finally:
            torch.ops.infer.set_threads_here(threads)


# ---------------------------------------------------------------------- a CPU, by Python


class _Called(Pending):
    def __init__(self, future: Future[tuple[Tensor, ...]]) -> None:
        self.future = future

    def done(self) -> bool:
        return self.future.done()

    def wait(self) -> tuple[Tensor, ...]:
        return self.future.result()


class ThreadStream(Stream):
    """A CPU's stream without recordings: calls the functions in a Python thread of its own."""

    def __init__(self) -> None:
        self._threads: dict[int, Executor] = {}  # by process: a forked one has no threads of its parent
        self._times: HostTimes | None = None

    @property
    def _thread(self) -> Executor:
        process = os.getpid()
        if process not in self._threads:
            self._threads[process] = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stream")
        return self._threads[process]

    def submit(
        self,
        key: Hashable,
        function: Function,
        inputs: Sequence[Tensor],
        after: Pending | None = None,
        *,
        fetch: bool = True,  # noqa: ARG002 - results are on the host anyway
        by_row: bool = False,  # noqa: ARG002 - work runs with any number of rows
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
    """Launched kernels. If the host will read their results, a copy follows on the stream for copies."""

    def __init__(self, outputs: tuple[Tensor, ...], copies: torch.cuda.Stream | None) -> None:
        self.outputs = outputs
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._ready.record()
        if copies is None:
            return
        with torch.cuda.stream(copies):
            copies.wait_event(self._ready)  # waits for this work alone, not for work launched later
            self.outputs = tuple(output.to("cpu", non_blocking=True) for output in outputs)
            for output in outputs:
                output.record_stream(copies)
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._ready.record()

    def done(self) -> bool:
        return bool(self._ready.query())  # type: ignore[no-untyped-call]

    def wait(self) -> tuple[Tensor, ...]:
        self._ready.synchronize()
        return self.outputs


class CudaStream(Stream):
    """A GPU's stream: one CUDA stream for all passes, one for copies to the host, and one for `aside`.

    The stream for copies usually waits for the newest pass. A function that `aside` runs touches finished work
    only, so it must not queue behind that copy.

    Kernels are launched from Python, some hundred a pass. Work that is submitted `by_row` (row i of a result needs
    only row i of the inputs) is launched as one captured graph instead, if a graph has room for its rows. Graphs
    may write their results to the same tensors. So work that reads a graph's results must be submitted before the
    next graph is launched.

    Attributes:
        graphs: the captured graphs of work that is submitted `by_row`.
    """

    def __init__(self, device: torch.device, graph_sizes: Sequence[int]) -> None:
        self._device = device
        self._compute = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._looks = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._compute.wait_stream(torch.cuda.default_stream(device))  # the weights were loaded there
        self.graphs = Graphs(graph_sizes, self._capture, self._to_device)
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
                outputs = self.graphs.run(key, function, inputs)
            else:
                before = after.outputs if isinstance(after, _Launched | Done) else ()
                outputs = function(*before, *inputs)
            return _Launched(outputs, self._copies if fetch else None)

    def _capture(self, function: Callable[..., None], inputs: Sequence[Tensor]) -> CudaGraph:
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        try:
            return CudaGraph(function, inputs, self._memory)
        except RuntimeError:
            self._memory = None  # a failed capture keeps its pool occupied: the next one gets a new pool
            raise

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def entered(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._compute)

    def call(self, function: Callable[[], T]) -> T:
        with self.entered():
            outcome = function()
        self._compute.synchronize()
        return outcome

    def aside(self, function: Callable[[], T]) -> T:
        with torch.cuda.stream(self._looks):
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
