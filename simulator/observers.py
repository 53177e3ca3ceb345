"""What is kept of a simulation: everything, or the numbers that a table needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.results import RequestRecord
from common.request import StepOutput
from common.telemetry import StepRecord
from simulator.arrivals import Arrival
from simulator.loop import Server


@dataclass(slots=True)
class Timelines:
    """Everything: each request's timeline, as the load generator would have it, and each step.

    Attributes:
        requests: in the order they were sent.
        steps: of all servers, in the order they ended.
    """

    requests: list[RequestRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    _open: dict[str, RequestRecord] = field(default_factory=dict)

    def on_sent(self, arrival: Arrival, prompt_tokens: int, time_s: float) -> None:
        record = RequestRecord(
            index=arrival.index,
            scheduled_s=time_s,
            sent_s=time_s,
            prompt_tokens=prompt_tokens,
            max_tokens=arrival.new_tokens,
        )
        self.requests.append(record)
        self._open[str(arrival.index)] = record

    def on_outputs(self, outputs: Sequence[StepOutput], time_s: float) -> None:
        for output in outputs:
            record = self._open[output.request_id]
            record.token_times_s.append(time_s)
            if output.finished:
                record.finished_s = time_s
                record.completion_tokens = output.completion_tokens
                record.finish_reason = output.finish_reason
                del self._open[output.request_id]

    def on_step(self, server: Server, record: StepRecord) -> None:  # noqa: ARG002 - whoever's it is
        self.steps.append(dataclasses.replace(record))
