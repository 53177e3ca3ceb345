"""Runners whose forward passes take virtual time and compute nothing.

A phase's own runner turns plans into passes. Sequences get longer, tokens end requests and full blocks are shared,
as with a model. Only the model is left out, and the index tensors that it would read.

```text
synchronous   host    [plan][ pass ............ ][read][plan][ pass ……
pipelined     host    [plan t][plan t+1][ wait .. ][read t][plan t+2][ wait ……
              device          [ pass t .......... ][ pass t+1 ....... ][ pass t+2 ……
```
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from common.devices.streams import Pending
from common.engine.runner import ForwardPass, Launched, Runner, SampledPass
from common.engine.scheduling import RowCost, Scheduler, StepPlan
from common.request import Request, StepOutput
from common.sampling.draw import Sampled
from common.startup.warm_up import ROWS
from phase9_pipelined import Runner as PipelinedRunner
from phase9_pipelined.state import LaunchedPass
from phase10_speculative import Runner as SpeculativeRunner
from phase10_speculative import Scheduler as SpeculativeScheduler
from phase10_speculative.drafters import Drafter
from simulator.clock import VirtualClock
from simulator.cost import Cost, Work

TOKEN = 0  # the token id of every output
OTHER_TOKEN = 1  # the token id where a guess, which is always `TOKEN`, was wrong

_NOTHING = torch.zeros(0, dtype=torch.int64)  # stands for the tokens that a pass samples


class SimulatedRunner(Runner):
    """Takes the passes of a plan from a phase's own runner. Launching a pass advances the clock by the pass's time.

    Attributes:
        planner: the phase's runner.
        clock: the engine's clock.
        cost: the times of passes and of the host's work.
    """

    def __init__(self, planner: Runner, clock: VirtualClock, cost: Cost) -> None:
        super().__init__(planner.config, planner.model, planner.pool, planner.telemetry)
        self.planner, self.clock, self.cost = planner, clock, cost

    def token(self) -> int:
        """Return the token id of the next output."""
        return TOKEN

    def passes(self, plan: StepPlan) -> Iterable[ForwardPass]:
        return self.planner.passes(plan)

    def _launch_pass(self, forward_pass: ForwardPass, launched: Launched) -> None:
        self.clock.advance(self.cost.pass_s(Work.of(forward_pass, self.pool)))
        launched.sampled.append(SampledPass(self._count(forward_pass), Sampled(_NOTHING)))

    def _count(self, forward_pass: ForwardPass) -> tuple[Request, ...]:
        """Apply a pass's bookkeeping without computing it. Returns the requests that receive a token."""
        shares = forward_pass.shares
        self.telemetry.current.passes += 1
        self.pool.advance([share.span for share in shares])
        self.count_as_computed(forward_pass)
        return forward_pass.sampled_rows()[0]

    def commit(self, launched: Launched) -> list[StepOutput]:
        outputs = [
            output
            for done in launched.sampled
            for output in self.commit_rows(
                done.requests, [self.token() for _ in done.requests], [None] * len(done.requests)
            )
        ]
        if launched.sampled:  # a step that only frees memory takes no time
            self.clock.advance(self.cost.host_step_s + self.cost.host_row_s * len(outputs))
        self.register_prefixes(launched.plan)
        return outputs


class _Due(Pending):
    """The pending result of a pass that ends at a given time of the virtual clock."""

    def __init__(self, clock: VirtualClock, time_s: float) -> None:
        self._clock = clock
        self._time_s = time_s

    def done(self) -> bool:
        return self._clock.now >= self._time_s

    def wait(self) -> tuple[Tensor, ...]:
        self._clock.wait_until(self._time_s)
        return (_NOTHING,)


class SimulatedPipelinedRunner(SimulatedRunner, PipelinedRunner):
    """Phase 9's runner: a simulated device computes submitted passes in order while the host's time goes on."""

    _device_free_s = 0.0  # when all submitted passes will be done

    def _launch_one(self, forward_pass: ForwardPass) -> LaunchedPass:
        begins_s = max(self.clock.now, self._device_free_s)
        self._device_free_s = begins_s + self.cost.pass_s(Work.of(forward_pass, self.pool))
        return LaunchedPass(
            forward_pass.shares, self._count(forward_pass), _Due(self.clock, self._device_free_s)
        )

    def _sample_one(self, launched: LaunchedPass) -> Pending:
        return launched.work  # sampling is part of the pass's time

    def _aside(self, function: Callable[[], None]) -> None:
        function()  # nothing computes beside the host


class SimulatedSpeculativeRunner(SimulatedPipelinedRunner, SpeculativeRunner):
    """Phase 10's runner. A guess is right with the probability `acceptance`."""

    acceptance = 0.0
    _draw = random.Random(0)

    def token(self) -> int:
        right = not self.acceptance or self._draw.random() < self.acceptance
        return TOKEN if right else OTHER_TOKEN


class Guesses:
    """A drafter that always guesses `TOKEN`, or never guesses."""

    matched = 1

    def __init__(self, *, never: bool) -> None:
        self._never = never

    def propose(self, token_ids: Sequence[int], limit: int) -> list[int]:  # noqa: ARG002 - the text is made up
        return [] if self._never else [TOKEN] * limit


def simulated(runner: Runner, clock: VirtualClock, cost: Cost) -> SimulatedRunner:
    """Return a runner that makes the same passes as a phase's runner, and computes nothing."""
    if isinstance(runner, SpeculativeRunner):
        return SimulatedSpeculativeRunner(runner, clock, cost)
    made = SimulatedPipelinedRunner if isinstance(runner, PipelinedRunner) else SimulatedRunner
    return made(runner, clock, cost)


def accept(runner: Runner, scheduler: Scheduler, acceptance: float) -> None:
    """Set the probability that phase 10's guesses are right; 0: no guesses. Other phases stay unchanged.

    If the scheduler weighs the cost of guesses (`row_cost`), this cost is computed from the runner's prices.
    """
    if isinstance(runner, SimulatedSpeculativeRunner) and isinstance(scheduler, SpeculativeScheduler):
        runner.acceptance = acceptance
        runner._draw = random.Random(0)
        cost = runner.cost
        if scheduler.row_cost is not None:
            host_s = cost.host_step_s
            one_s, many_s = (host_s + cost.pass_s(Work(0, 0, 0, rows, 0, rows)) for rows in (1, ROWS))
            scheduler.row_cost = RowCost.of(one_s, many_s, ROWS, host_s)
        drafter = Guesses(never=not acceptance)

        def new_drafter(request: Request) -> Drafter:  # noqa: ARG001 - the same for all
            return drafter

        scheduler.new_drafter = new_drafter  # type: ignore[method-assign]
