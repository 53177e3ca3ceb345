"""Observers that record a simulation: every request's timeline, or only the metrics of a table."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.metrics import GOOD_SHARE, server_metrics
from benchmarks.results import Metrics, Percentiles, RequestRecord, ServerMetrics
from common.engine.engine import Engine
from common.engine.scheduling import StepPlan
from common.engine.telemetry import Counters, StepRecord
from common.request import StepOutput
from simulator.arrivals import Arrival


@dataclass(slots=True)
class Timelines:
    """Keeps each request's timeline, as the load generator would record it.

    Attributes:
        requests: in the order they were sent.
    """

    requests: list[RequestRecord] = field(default_factory=list)
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


class Durations:
    """A histogram of durations with logarithmic bins. It takes a few kilobytes for any number of durations.

    Percentiles have an error of at most 0.1 %. Mean and maximum are exact.
    """

    FINE = 500  # bins for each factor of e: a bin is 0.2 % wide

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.max = 0.0
        self._counts: Counter[int] = Counter()

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
        """Return the duration with this rank, about. The shortest duration has rank 0."""
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


@dataclass(slots=True)
class _Open:
    """A request whose answer is not complete. `slow_gaps` counts its gaps that are longer than the objective."""

    sent_s: float
    prompt_tokens: int
    first_s: float = -1.0
    last_s: float = -1.0
    slow_gaps: int = 0


class Summary:
    """Computes the metrics of `benchmarks compare`. Its memory does not grow with the number of answered requests.

    Args:
        engines: the engines that serve the requests; their steps are counted.
        slo_ttft_s, slo_itl_s: objectives for the first token and for gaps between tokens, in seconds.
    """

    def __init__(self, engines: Sequence[Engine], *, slo_ttft_s: float = 2.0, slo_itl_s: float = 0.2) -> None:
        self._engines = engines
        for engine in engines:
            engine.watchers.append(self._on_step)
        self._slo_ttft_s, self._slo_itl_s = slo_ttft_s, slo_itl_s
        self._ttft, self._itl, self._latency = Durations(), Durations(), Durations()
        self._sent = self._good = self._output_tokens = self._prompt_tokens = 0
        self._first_sent_s, self._last_sent_s, self._last_answer_s = math.inf, 0.0, 0.0
        self._open: dict[str, _Open] = {}
        self._decoding_steps = self._kv_used_max = self._kv_reserved_max = 0
        self._kv_used_time = self._kv_reserved_time = 0.0

    def on_sent(self, arrival: Arrival, prompt_tokens: int, time_s: float) -> None:
        self._sent += 1
        self._first_sent_s = min(self._first_sent_s, time_s)
        self._last_sent_s = max(self._last_sent_s, time_s)
        self._open[str(arrival.index)] = _Open(time_s, prompt_tokens)

    def on_outputs(self, outputs: Sequence[StepOutput], time_s: float) -> None:
        for output in outputs:
            request = self._open[output.request_id]
            if request.first_s < 0:
                request.first_s = time_s
                self._ttft.add(time_s - request.sent_s)
            else:
                gap = time_s - request.last_s
                self._itl.add(gap)
                request.slow_gaps += gap > self._slo_itl_s
            request.last_s = time_s
            if output.finished:
                self._end(self._open.pop(output.request_id), output.completion_tokens)

    def _end(self, request: _Open, tokens: int) -> None:
        self._output_tokens += tokens
        self._prompt_tokens += request.prompt_tokens
        self._last_answer_s = max(self._last_answer_s, request.last_s)
        self._latency.add(request.last_s - request.sent_s)
        gaps = tokens - 1
        in_time = request.first_s - request.sent_s <= self._slo_ttft_s
        self._good += in_time and gaps - request.slow_gaps >= GOOD_SHARE * gaps

    def _on_step(self, record: StepRecord, _plan: StepPlan, _outputs: Sequence[StepOutput]) -> None:
        self._decoding_steps += record.decode_tokens > 0
        self._kv_used_time += record.kv_used_tokens * record.duration_s
        self._kv_reserved_time += record.kv_reserved_tokens * record.duration_s
        self._kv_used_max = max(self._kv_used_max, record.kv_used_tokens)
        self._kv_reserved_max = max(self._kv_reserved_max, record.kv_reserved_tokens)

    # ------------------------------------------------------------------ tables

    def metrics(self) -> Metrics:
        """Return the clients' metrics. Call this after the last answer."""
        completed = self._latency.count
        duration_s = self._last_answer_s - self._first_sent_s if completed else 0.0
        per_s = 1 / duration_s if duration_s > 0 else 0.0
        sending_s = self._last_sent_s - self._first_sent_s
        return Metrics(
            requests=self._sent,
            completed=completed,
            errors=self._sent - completed,
            short=0,
            duration_s=duration_s,
            output_tokens=self._output_tokens,
            prompt_tokens=self._prompt_tokens,
            output_tokens_per_s=self._output_tokens * per_s,
            requests_per_s=completed * per_s,
            arrival_rate=(self._sent - 1) / sending_s if self._sent > 1 and sending_s > 0 else None,
            ttft_s=self._ttft.percentiles(),
            itl_s=self._itl.percentiles(),
            latency_s=self._latency.percentiles(),
            longest_stall_s=self._itl.max if self._itl.count else None,
            slo_attainment=self._good / self._sent if self._sent else 0.0,
            slo_ttft_s=self._slo_ttft_s,
            slo_itl_s=self._slo_itl_s,
        )

    def server_metrics(self) -> ServerMetrics:
        """Return the metrics of all engines together: counts are sums.

        Numbers about KV memory and the batch are for one engine: means over the steps of all engines, and the
        largest value in any engine.
        """
        total = _sum([engine.telemetry.counters for engine in self._engines])
        busy_s = total.busy_s
        return server_metrics(
            dataclasses.asdict(total),
            mean_batch=total.decode_tokens / self._decoding_steps if self._decoding_steps else 0.0,
            kv_used_mean=self._kv_used_time / busy_s if busy_s else 0.0,
            kv_used_max=self._kv_used_max,
            kv_reserved_mean=self._kv_reserved_time / busy_s if busy_s else 0.0,
            kv_reserved_max=self._kv_reserved_max,
        )


def _sum(counters: Sequence[Counters]) -> Counters:
    names = [each.name for each in dataclasses.fields(Counters)]
    return Counters(**{name: sum(getattr(each, name) for each in counters) for name in names})
