"""Replays a measured run: the same engine steps, and the work in each of them.

A run's file says how long each step took, how many tokens it decoded and prefilled, and how many requests there
were. It does not say how many keys its forward passes read. So the phase's own engine runs the steps again,
without a model: before each step, requests are added until there are as many as in the record. If the engine then
plans as many tokens as the record counts, its passes do the work that was measured.

```text
record          step 211   waiting 0   active 5   decode 4   prefill 256           31.2 ms
simulation      step 211   waiting 0   active 5   decode 4   prefill 256   rows 4, columns 3,377, pairs 163,968
                                └── one more request is added, so that there are five
```
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.results import RequestRecord, Run
from benchmarks.workloads import WORKLOADS, PlannedRequest, planned_requests
from common.engine.config import EngineConfig
from common.engine.engine import Engine
from common.request import Request
from common.startup.phases import PhasePackage, find_phase
from simulator.arrivals import Unlike
from simulator.cost import Cost, Work
from simulator.engine import simulate_engine
from simulator.loop import params
from simulator.runner import TOKEN, SimulatedRunner

#: Options of a server that do not change which work its engine plans.
NO_SCHEDULE = frozenset({"device", "dtype", "host", "port", "native-kernels", "no-native-kernels"})

_COMPARED = ("waiting", "active", "passes", "decode_tokens", "prefill_tokens", "padded_tokens", "idle_rows")


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A measured step, and the work that the replayed engine planned for it.

    Attributes:
        started_s, duration_s: as measured.
        works: the work of each forward pass.
        tokens: the number of tokens that the replayed step delivered.
        goes_on: whether the next step was due at once.
        is_same: whether the replayed engine planned the work that the record counts.
    """

    started_s: float
    duration_s: float
    works: tuple[Work, ...]
    tokens: int
    goes_on: bool
    is_same: bool


@dataclass(frozen=True, slots=True)
class Replay:
    """A run, its replayed steps, and delays between clients and engine.

    Attributes:
        arrivals_s: for each request that found the engine idle, the seconds from its sending to the step that
            queued it.
        deliveries_s: for each token, the seconds from its step's end to its arrival at the client.
    """

    run: Run
    steps: list[ReplayedStep] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    deliveries_s: list[float] = field(default_factory=list)


@dataclass
class _Noted(Cost):
    """A cost under which passes take no time. It notes the work of each launched pass."""

    works: list[Work] = field(default_factory=list)

    def pass_s(self, work: Work) -> float:
        self.works.append(work)
        return 0.0


# ---------------------------------------------------------------------- a run's engine and requests


def phase_of(run: Run) -> PhasePackage:
    """Return the phase that a run measured: the whole part of its server's `order` is the phase's number."""
    return find_phase(int(run.server.order))


def options_of(config: type[EngineConfig], options: Mapping[str, str]) -> dict[str, Any]:
    """Return command-line options as fields of a phase's `Config`.

    `x` with an empty value becomes True, `no-x` makes x False, and the value `none` becomes None.
    """
    found: dict[str, Any] = {}
    for option, value in options.items():
        name = option.replace("-", "_")
        if not value and name not in config.model_fields:
            found[name.removeprefix("no_")] = False
        else:
            found[name] = None if value == "none" else value or True
    return found


def schedule_options(run: Run) -> dict[str, Any]:
    """Return the options of a run's server that may change the work that its engine plans, as `Config` fields."""
    given = run.server.options or {}
    config = phase_of(run).Config
    return options_of(config, {name: value for name, value in given.items() if name not in NO_SCHEDULE})


def plan_of(run: Run) -> list[PlannedRequest]:
    """Return the planned requests of a run in the order of their indices, with prompts that share no tokens."""
    info, calibration = run.workload, run.calibration
    factor = calibration.factor if calibration is not None else 1.0
    return list(
        planned_requests(WORKLOADS[info.name], Unlike(), seed=info.seed, factor=factor, quick=info.quick)
    )


def prompts_of(plan: Sequence[PlannedRequest]) -> list[list[int]]:
    """Return the whole prompt of each request. In a conversation, it begins with earlier prompts and answers."""
    prompts: list[list[int]] = []
    for planned in plan:
        begin: list[int] = []
        if planned.follows is not None:
            begin = prompts[planned.follows] + [TOKEN] * plan[planned.follows].max_tokens
        prompts.append(begin + planned.token_ids)
    return prompts


def order_of_arrival(run: Run) -> list[RequestRecord]:
    """Return a run's requests in the order in which the engine got them.

    Sockets decide the order within a burst. This order is read from the times of the first tokens, because every
    phase begins with the request that arrived first.
    """

    def key(record: RequestRecord) -> tuple[float, float]:
        assert record.sent_s is not None
        at_once = record.sent_s < BURST_S and run.workload.arrivals in ("burst", "turns")
        return (0.0, record.token_times_s[0]) if at_once else (record.sent_s, 0.0)

    return sorted(run.requests, key=key)


BURST_S = 0.02  # requests that are sent within this time of a run's start have been sent at once


# ---------------------------------------------------------------------- the replay


class _Replayer:
    """Steps an engine through a run. Before each step it queues requests until as many are waiting or active as the
    run's record of that step counts."""

    def __init__(self, run: Run) -> None:
        assert run.engine_steps is not None
        self.columns = run.engine_steps
        self.cost = _Noted()
        self.engine: Engine = simulate_engine(phase_of(run), self.cost, **schedule_options(run))
        assert isinstance(self.engine.runner, SimulatedRunner)
        self.clock = self.engine.runner.clock
        self.records = {str(record.index): record for record in run.requests}
        self.to_come = deque(order_of_arrival(run))
        self.prompts = prompts_of(plan_of(run))
        self.tokens_read: dict[str, int] = dict.fromkeys(self.records, 0)
        self.result = Replay(run)
        # The hook is in `retire`: ended requests are known then, and new requests must be queued before `admit`.
        self._retire = self.engine.scheduler.retire
        self.engine.scheduler.retire = self._retire_and_let_in  # type: ignore[method-assign]

    def replay(self) -> Replay:
        for place in range(len(self.columns["step"])):
            self._place = place
            self._step()
        return self.result

    def _step(self) -> None:
        started_s, duration_s = (
            float(self.columns[name][self._place]) for name in ("started_s", "duration_s")
        )
        self.cost.works.clear()
        self.clock.wait_until(started_s)
        outputs = self.engine.step()
        record = self.engine.telemetry.latest
        is_same = all(getattr(record, name) == self.columns[name][self._place] for name in _COMPARED)
        goes_on = self.engine.next_wake() == self.clock.now
        works = tuple(self.cost.works)
        self.result.steps.append(ReplayedStep(started_s, duration_s, works, len(outputs), goes_on, is_same))
        for output in outputs:
            times = self.records[output.request_id].token_times_s
            place = self.tokens_read[output.request_id]
            self.tokens_read[output.request_id] += 1
            self.result.deliveries_s.append(times[place] - started_s - duration_s)

    def _retire_and_let_in(self) -> list[Request]:
        retired = self._retire()
        scheduler = self.engine.scheduler
        there = int(self.columns["waiting"][self._place] + self.columns["active"][self._place])
        was_idle = not self.result.steps or not self.result.steps[-1].goes_on
        while self.to_come and scheduler.num_waiting + len(scheduler.active) < there:
            record = self.to_come.popleft()
            assert record.sent_s is not None
            now = self.clock.now
            if was_idle:
                self.result.arrivals_s.append(now - record.sent_s)
            self.clock.now = min(now, record.sent_s)  # phase 4's batch timer begins at that time
            request = Request(str(record.index), self.prompts[record.index], params(record.max_tokens))
            self.engine.add_request(request)
            self.clock.now = now
        return retired


def replay(run: Run) -> Replay:
    """Replay the engine steps of a run of a phase.

    Raises:
        ValueError: the run has no engine steps, or is a peer's.
    """
    if run.engine_steps is None or run.server.options is None or not run.engine_steps:
        raise ValueError(f"{run.file_name} has no engine steps, or is no phase's")
    return _Replayer(run).replay()
