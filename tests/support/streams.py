"""A stream that runs work only when a test says so, and engines that use it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from common.devices.graphs import Graphs
from common.devices.streams import Pending, Stream
from common.engine.engine import Engine
from common.request import Request
from kernels.tape import Function
from phase9_pipelined import Runner
from phase10_speculative.drafters import Drafter
from phase10_speculative.scheduler import SpeculativeScheduler
from tests.support.engines import build

#: Gets a request, its tokens so far and a number of tokens; returns guesses of the next ones.
Guess = Callable[[Request, Sequence[int], int], list[int]]


class FixedDrafter:
    """A drafter that calls a function."""

    matched = 1

    def __init__(self, request: Request, guess: Guess) -> None:
        self._request = request
        self._guess = guess

    def propose(self, token_ids: Sequence[int], limit: int) -> list[int]:
        return self._guess(self._request, token_ids, limit)


def let_guess(engine: Engine, guess: Guess) -> None:
    """Make an engine of phase 10 guess by a function."""

    def new_drafter(request: Request) -> Drafter:
        return FixedDrafter(request, guess)

    assert isinstance(engine.scheduler, SpeculativeScheduler)
    engine.scheduler.new_drafter = new_drafter  # type: ignore[method-assign]


def guessing(guess: Guess, model: Any = None, **options: Any) -> Engine:
    """Return an engine that guesses by a function, and computes guesses whether they pay or not."""
    engine = build("phase10_speculative", model, **({"draft_rows": 64} | options))
    let_guess(engine, guess)
    return engine


def by_rule(rule: Callable[[list[int]], Any], wrong_at: Callable[[int], bool]) -> Guess:
    """Guess by the rule of a `RememberingModel`. The guesses at some places of the text are wrong."""

    def guess(_: Request, token_ids: Sequence[int], limit: int) -> list[int]:
        text = list(token_ids)
        guesses: list[int] = []
        for _ in range(limit):
            token = rule(text)
            right = token if isinstance(token, int) else 0
            guesses.append(right + 1 if wrong_at(len(text)) else right)
            text.append(right)
        return guesses

    return guess


class StandIn:
    """Calls the captured function where a graph would launch its kernels."""

    def __init__(self, function: Callable[..., None], inputs: Sequence[Tensor]) -> None:
        self._function = function
        self._inputs = [each.clone() for each in inputs]

    def set(self, inputs: Sequence[Tensor]) -> None:
        for kept, given in zip(self._inputs, inputs, strict=True):
            kept.copy_(given)

    def replay(self) -> None:
        self._function(*self._inputs)


class StandIns(Graphs):
    """Graphs made of `StandIn`, for a CPU.

    Attributes:
        captured_rows: the rows of each capture, in order.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        fails: Callable[[int], bool] = lambda _: False,
        to_device: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        self.captured_rows: list[int] = []

        def capture(function: Callable[..., None], inputs: Sequence[Tensor]) -> StandIn:
            self.captured_rows.append(len(inputs[0]))
            if fails(len(inputs[0])):
                raise RuntimeError("this capture fails")
            return StandIn(function, inputs)

        super().__init__(sizes, capture, to_device)


T = TypeVar("T")


class Work(Pending):
    """Work that was submitted to a `ManualStream`."""

    def __init__(self, stream: ManualStream, name: str, run: Callable[[], tuple[Tensor, ...]]) -> None:
        self.name = name
        self.is_done = False
        self._stream = stream
        self._run = run
        self._outputs: tuple[Tensor, ...] = ()
        self._error: Exception | None = None

    def execute(self) -> None:
        self.is_done = True
        try:
            with torch.inference_mode():
                self._outputs = self._run()
        except Exception as error:
            self._error = error

    def done(self) -> bool:
        return self.is_done

    def wait(self) -> tuple[Tensor, ...]:
        self._stream.log.append(f"wait {self.name}")
        self._stream.finish(up_to=self)
        return self.outcome()

    def outcome(self) -> tuple[Tensor, ...]:
        if self._error is not None:
            raise self._error
        return self._outputs


class ManualStream(Stream):
    """Runs submitted work in order, when a test calls `finish` or the engine waits for it.

    Attributes:
        log: submissions, executions and waits, numbered by the kind of work: "submit forward 2".
        faults: errors that work raises instead of running, by its name: "forward 2".
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.queue: deque[Work] = deque()
        self.faults: dict[str, Exception] = {}
        self._counts: dict[str, int] = {}

    def submit(
        self,
        key: Hashable,
        function: Function,
        inputs: Sequence[Tensor],
        after: Pending | None = None,
        *,
        fetch: bool = True,
        by_row: bool = False,
        rows: int | None = None,
    ) -> Pending:
        kind = key if isinstance(key, str) else str(key[0])  # type: ignore[index]
        self._counts[kind] = self._counts.get(kind, -1) + 1
        name = f"{kind} {self._counts[kind]}"
        if (fault := self.faults.get(f"submit {name}")) is not None:
            raise fault
        kept = [each.clone() for each in inputs]

        def run() -> tuple[Tensor, ...]:
            self.log.append(f"do {name}")
            if name in self.faults:
                raise self.faults[name]
            assert all(torch.equal(now, then) for now, then in zip(inputs, kept, strict=True)), (
                "inputs changed"
            )
            before: tuple[Tensor, ...] = ()
            if after is not None:
                assert isinstance(after, Work)
                before = after.outcome()
            return function(*before, *inputs)

        self.log.append(f"submit {name}")
        self.queue.append(Work(self, name, run))
        return self.queue[-1]

    def call(self, function: Callable[[], T]) -> T:
        self.finish()
        return function()

    def aside(self, function: Callable[[], T]) -> T:
        return function()

    def drain(self) -> None:
        self.finish()

    def finish(self, up_to: Work | None = None) -> None:
        """Run all submitted work, or all up to and including `up_to`."""
        while self.queue and not (up_to is not None and up_to.is_done):
            self.queue.popleft().execute()


def engine_of(model: Any = None, **options: Any) -> tuple[Engine, ManualStream]:
    """Build an engine on a `ManualStream`. Returns both."""
    engine = build("phase9_pipelined", model, **options)
    runner = runner_of(engine)
    stream = ManualStream()
    runner.stream = stream
    return engine, stream


def runner_of(engine: Engine) -> Runner:
    assert isinstance(engine.runner, Runner)
    return engine.runner
