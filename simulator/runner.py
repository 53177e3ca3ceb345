"""A phase's own runner with simulated forward passes: they take virtual time and compute nothing.

Plans become passes (`Runner.passes`), lengths advance, tokens end requests and full blocks are shared as always.
Only the model is left out, and the index tensors that it would read.

```text
synchronous   host    [plan][ pass ............ ][read][plan][ pass ……
pipelined     host    [plan t][plan t+1][ wait .. ][read t][plan t+2][ wait ……
              device          [ pass t .......... ][ pass t+1 ....... ][ pass t+2 ……
```
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from common.commit import commit_token
from common.config import EngineConfig
from common.kv import KVPool
from common.models.layers import CausalLM
from common.request import Request, StepOutput
from common.runner import ForwardPass, Launched, Runner, SampledPass
from common.sampling import Sampled
from common.scheduling import StepPlan
from common.streams import Pending
from common.telemetry import Telemetry
from phase9_pipelined import Runner as PipelinedRunner
from phase9_pipelined.slots import LaunchedPass
from simulator.clock import VirtualClock
from simulator.cost import Cost, Work

TOKEN = 0  # the token id of every output

_NOTHING = torch.zeros(0, dtype=torch.int64)  # in the place of a pass's tokens


class SimulatedRunner(Runner):
    """A base class that `simulated` puts before a phase's runner in the method resolution order.

    Attributes:
        clock: the engine's clock.
        cost: what takes how long.
    """

    clock: VirtualClock
    cost: Cost

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
            commit_token(request, TOKEN)
            for done in launched.sampled
            for request in done.requests
            if not request.is_terminal
        ]
        if launched.sampled:  # not in a step that only lets go of those who are done
            self.clock.advance(self.cost.host_step_s + self.cost.host_row_s * len(outputs))
        self.register_prefixes(launched.plan)
        return outputs


class _Due(Pending):
    """A pass that ends at a given time."""

    def __init__(self, clock: VirtualClock, time_s: float) -> None:
        self._clock = clock
        self._time_s = time_s

    def done(self, within_s: float = 0.0) -> bool:
        return self._clock.now + within_s >= self._time_s

    def wait(self) -> tuple[Tensor, ...]:
        self._clock.wait_until(self._time_s)
        return (_NOTHING,)


class SimulatedPipelinedRunner(SimulatedRunner, PipelinedRunner):
    """A simulated device computes the submitted passes one after the other while the host's time goes on."""

    _device_free_s = 0.0  # when all submitted passes will be done

    def _launch_one(self, forward_pass: ForwardPass) -> LaunchedPass:
        begins_s = max(self.clock.now, self._device_free_s)
        self._device_free_s = begins_s + self.cost.pass_s(Work.of(forward_pass, self.pool))
        return LaunchedPass(self._count(forward_pass), _Due(self.clock, self._device_free_s))

    def _sample_one(self, launched: LaunchedPass) -> Pending:
        return launched.forward  # choosing is part of the pass's time

    # Nothing computes beside the host, so there is no stream to go to.

    def register_prefixes(self, plan: StepPlan) -> None:
        Runner.register_prefixes(self, plan)

    def release(self, requests: Iterable[Request]) -> None:
        Runner.release(self, requests)


@functools.cache
def simulated(runner: type[Runner]) -> type[Runner]:
    """Return a subclass of a phase's runner with simulated passes."""
    passes = SimulatedPipelinedRunner if issubclass(runner, PipelinedRunner) else SimulatedRunner

    class Simulated(passes, runner):  # type: ignore[misc,valid-type]  # both classes are chosen at run time
        """A phase's runner with simulated passes."""

    return Simulated


def make_runner(
    runner: type[Runner],
    config: EngineConfig,
    model: CausalLM,
    pool: KVPool,
    telemetry: Telemetry,
    *,
    clock: VirtualClock,
    cost: Cost,
) -> Runner:
    """Return a phase's runner whose passes take the time that `cost` says, and compute nothing."""
    made = simulated(runner)(config, model, pool, telemetry)
    assert isinstance(made, SimulatedRunner)
    made.clock, made.cost = clock, cost
    return made
