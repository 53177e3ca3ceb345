"""Records of a simulation: all timelines, or only the numbers of a table, whatever the number of requests."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.metrics import GOOD_SHARE
from benchmarks.results import Metrics, Percentiles, RequestRecord, ServerMetrics
from common.engine import Engine
from common.request import StepOutput
from common.telemetry import Counters, StepRecord
from simulator.arrivals import Arrival
from simulator.loop import Server


@dataclass(slots=True)
class Timelines:
    """Keeps each request's timeline, as the load generator would record it, and each step.

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


class Distribution:
    """A histogram of durations over their logarithm: any number of them in a few kilobytes.

    Percentiles are good to 0.1 %; mean and maximum are exact.
    """

    FINE = 500  # counts for each factor of e: neighbours are 0.2 % apart

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.max = 0.0
        self._counts: defaultdict[int, int] = defaultdict(int)

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total += seconds
        if seconds > self.max:
            self.max = seconds
        self._counts[math.floor(math.log(seconds) * self.FINE) if seconds > 0 else -(2**31)] += 1

    def percentile(self, share: float) -> float:
        """Return a percentile, interpolated between two values as in `benchmarks.metrics.percentile`."""
        place = share * (self.count - 1)
        below = math.floor(place)
        low, high = self._at(below), self._at(min(below + 1, self.count - 1))
        return low + (place - below) * (high - low)

    def _at(self, rank: int) -> float:
        """Return the value at a rank."""
        reached = 0
        for key in sorted(self._counts):
            reached += self._counts[key]
            if reached > rank:
                return min(math.exp((key + 0.5) / self.FINE), self.max)
        raise IndexError(f"there are {self.count} values, and none with the rank {rank}")

    def percentiles(self) -> Percentiles | None:
        """Return mean, percentiles and maximum; None if there are no durations."""
        if not self.count:
            return None
        p50, p95, p99 = map(self.percentile, (0.50, 0.95, 0.99))
        return Percentiles(p50=p50, p95=p95, p99=p99, max=self.max, mean=self.total / self.count)


class _Open:
    """A request whose answer is not complete."""

    __slots__ = ("first_s", "last_s", "prompt_tokens", "sent_s", "slow")

    def __init__(self, sent_s: float, prompt_tokens: int) -> None:
        self.sent_s = sent_s
        self.prompt_tokens = prompt_tokens
        self.first_s = self.last_s = -1.0
        self.slow = 0  # gaps beyond the objective


class Summary:
    """Computes the numbers of `benchmarks compare` in memory that does not grow with the number of requests.

    Args:
        slo_ttft_s, slo_itl_s: objectives for the first token and for the gaps.
    """

    def __init__(self, *, slo_ttft_s: float = 2.0, slo_itl_s: float = 0.2) -> None:
        self.slo_ttft_s, self.slo_itl_s = slo_ttft_s, slo_itl_s
        self.ttft, self.itl, self.latency = Distribution(), Distribution(), Distribution()
        self.sent = self.completed = self.good = self.output_tokens = self.prompt_tokens = 0
        self.first_sent_s, self.last_sent_s, self.last_answer_s = math.inf, 0.0, 0.0
        self._open: dict[str, _Open] = {}
        self.decoding_steps = self.kv_used_max = self.kv_reserved_max = 0
        self.kv_used_time = self.kv_reserved_time = 0.0

    def on_sent(self, arrival: Arrival, prompt_tokens: int, time_s: float) -> None:
        self.sent += 1
        self.first_sent_s = min(self.first_sent_s, time_s)
        self.last_sent_s = max(self.last_sent_s, time_s)
        self._open[str(arrival.index)] = _Open(time_s, prompt_tokens)

    def on_outputs(self, outputs: Sequence[StepOutput], time_s: float) -> None:
        for output in outputs:
            request = self._open[output.request_id]
            if request.first_s < 0:
                request.first_s = time_s
                self.ttft.add(time_s - request.sent_s)
            else:
                gap = time_s - request.last_s
                self.itl.add(gap)
                request.slow += gap > self.slo_itl_s
            request.last_s = time_s
            if output.finished:
                self._end(request, output.completion_tokens, time_s)
                del self._open[output.request_id]

    def _end(self, request: _Open, tokens: int, time_s: float) -> None:
        self.completed += 1
        self.output_tokens += tokens
        self.prompt_tokens += request.prompt_tokens
        self.last_answer_s = max(self.last_answer_s, time_s)
        self.latency.add(time_s - request.sent_s)
        gaps = tokens - 1
        in_time = request.first_s - request.sent_s <= self.slo_ttft_s
        self.good += in_time and gaps - request.slow >= GOOD_SHARE * gaps

    def on_step(self, server: Server, record: StepRecord) -> None:  # noqa: ARG002 - whoever's it is
        self.decoding_steps += record.decode_tokens > 0
        self.kv_used_time += record.kv_used_tokens * record.duration_s
        self.kv_reserved_time += record.kv_reserved_tokens * record.duration_s
        self.kv_used_max = max(self.kv_used_max, record.kv_used_tokens)
        self.kv_reserved_max = max(self.kv_reserved_max, record.kv_reserved_tokens)

    # ------------------------------------------------------------------ tables

    def metrics(self) -> Metrics:
        """Return the clients' metrics. Called after the last answer."""
        duration_s = self.last_answer_s - self.first_sent_s if self.completed else 0.0
        per_s = 1 / duration_s if duration_s > 0 else 0.0
        sending_s = self.last_sent_s - self.first_sent_s
        return Metrics(
            requests=self.sent,
            completed=self.completed,
            errors=self.sent - self.completed,
            short=0,
            duration_s=duration_s,
            output_tokens=self.output_tokens,
            prompt_tokens=self.prompt_tokens,
            output_tokens_per_s=self.output_tokens * per_s,
            requests_per_s=self.completed * per_s,
            arrival_rate=(self.sent - 1) / sending_s if self.sent > 1 and sending_s > 0 else None,
            ttft_s=self.ttft.percentiles(),
            itl_s=self.itl.percentiles(),
            latency_s=self.latency.percentiles(),
            longest_stall_s=self.itl.max if self.itl.count else None,
            slo_attainment=self.good / self.sent if self.sent else 0.0,
            slo_ttft_s=self.slo_ttft_s,
            slo_itl_s=self.slo_itl_s,
        )

    def server_metrics(self, engines: Iterable[Engine]) -> ServerMetrics:
        """Return the metrics of all engines together."""
        count = dict(_sums([engine.telemetry.counters for engine in engines]))
        wasted = count["padded_tokens"] + count["idle_rows"]
        computed = count["decode_tokens"] + count["prefill_tokens"] + wasted
        busy_s = count["busy_s"]
        return ServerMetrics(
            steps=int(count["steps"]),
            mean_batch=count["decode_tokens"] / self.decoding_steps if self.decoding_steps else 0.0,
            prefill_tokens=int(count["prefill_tokens"]),
            decode_tokens=int(count["decode_tokens"]),
            padded_tokens=int(count["padded_tokens"]),
            idle_rows=int(count["idle_rows"]),
            padded_share=wasted / computed if computed else 0.0,
            preemptions=int(count["preemptions"]),
            cached_share=count["cached_tokens"] / count["prompt_tokens"] if count["prompt_tokens"] else 0.0,
            evictions=int(count["evictions"]),
            busy_s=busy_s,
            kv_used_mean=self.kv_used_time / busy_s if busy_s else 0.0,
            kv_used_max=self.kv_used_max,
            kv_reserved_mean=self.kv_reserved_time / busy_s if busy_s else 0.0,
            kv_reserved_max=self.kv_reserved_max,
        )


def _sums(counters: Sequence[Counters]) -> Iterator[tuple[str, float]]:
    for each in dataclasses.fields(Counters):
        yield each.name, sum(getattr(one, each.name) for one in counters)
