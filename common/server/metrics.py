"""`GET /metrics`: the counts of the engine and its worker, in Prometheus's format.

A metric that vLLM has, too, has vLLM's name, so dashboards made for vLLM show it. Other names begin with `infer:`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from common.server.replies.answer import Answer
from common.server.service import Service
from common.telemetry import Counters, Histogram, RequestTelemetry

#: Memory, processor time and open files of this process: `process_*`, without labels, as every exporter has them.
_PROCESS = ProcessCollector(registry=None)

#: The engine's counters that have a name of vLLM's.
_VLLM_COUNTERS = {
    "prompt_tokens": ("vllm:prompt_tokens", "Prompt tokens of requests whose computation has begun"),
    "preemptions": ("vllm:num_preemptions", "Requests that lost their memory to others and began anew"),
}


_BETWEEN = "From one token of a request to its next, in seconds"

#: Histograms: the metric's name, the name in `RequestTelemetry`, and the text.
_HISTOGRAMS = (
    (
        "time_to_first_token_seconds",
        "time_to_first_token_s",
        "From a request's submission to its first token",
    ),
    ("inter_token_latency_seconds", "inter_token_latency_s", _BETWEEN),
    # The older name of the same, which older dashboards have.
    ("time_per_output_token_seconds", "inter_token_latency_s", _BETWEEN),
    ("e2e_request_latency_seconds", "end_to_end_s", "From a request's submission to its end"),
    (
        "request_queue_time_seconds",
        "queue_s",
        "From a request's submission until its prefill begins, or until it leaves the queue otherwise",
    ),
    ("request_prefill_time_seconds", "prefill_s", "From there to a request's first token"),
    ("request_decode_time_seconds", "decode_s", "From a request's first token to its last"),
    ("request_prompt_tokens", "prompt_lengths", "Prompt tokens of a request"),
    ("request_generation_tokens", "answer_lengths", "New tokens of a request"),
    (
        "request_max_num_generation_tokens",
        "longest_choices",
        "New tokens of the longest of the choices that continue a prompt",
    ),
)


class Metrics(Collector):
    """The metrics of one server, read anew for each scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._labels = ["model_name", "phase"]
        self._values = [service.model_name, service.engine.phase.slug]

    def render(self) -> tuple[bytes, str]:
        """Return the metrics and the name of their format, which every scraper reads.

        OpenMetrics is not offered. In that format the library writes `vllm_` for `vllm:`, and dashboards made for
        vLLM's names find nothing.
        """
        encode, content_type = choose_encoder("text/plain; version=0.0.4")
        return encode(self), content_type

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()
        yield from _PROCESS.collect()

    def _gauges(self) -> Iterator[Metric]:
        engine, worker = self._service.engine, self._service.worker
        latest = engine.telemetry.latest
        used = latest.kv_reserved_tokens / engine.config.kv_tokens()
        for name, text, value in (
            ("vllm:num_requests_running", "Requests that hold KV memory", latest.active),
            ("vllm:num_requests_waiting", "Requests that queue", worker.num_waiting()),
            ("vllm:kv_cache_usage_perc", "Share of the KV memory that is held; 1 is all of it", used),
        ):
            gauge = GaugeMetricFamily(name, text, labels=self._labels)
            gauge.add_metric(self._values, value)
            yield gauge

    def _counters(self) -> Iterator[Metric]:
        counters, requests = self._service.engine.telemetry.counters, self._service.worker.requests
        answers = self._service.answers
        looked_for = "Prompt tokens that were looked for in the prefix cache"
        yield self._counter(
            "vllm:generation_tokens", "Tokens that were handed to clients", requests.generation_tokens
        )
        yield self._counter("vllm:prefix_cache_queries", looked_for, counters.prompt_tokens)
        yield self._counter(
            "vllm:prefix_cache_hits", "Prompt tokens that were found there", counters.cached_tokens
        )
        yield self._counters_by(
            ["finished_reason"],
            "vllm:request_success",
            "Requests that ended",
            {(reason,): count for reason, count in requests.ended.items()},
        )
        yield self._counters_by(
            ["status", "reason"],
            "infer:http_answers",
            "HTTP answers, by the code of their error",
            {(str(status), reason): count for (status, reason), count in answers.items()},
        )
        for field in dataclasses.fields(Counters):
            other = f"infer:{_with_unit(field.name)}", f"`{field.name}` of /telemetry"
            name, text = _VLLM_COUNTERS.get(field.name, other)
            yield self._counter(name, text, getattr(counters, field.name))

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._counters_by([], name, text, {(): value})

    def _counters_by(
        self, labels: list[str], name: str, text: str, counts: Mapping[tuple[str, ...], float]
    ) -> Metric:
        """Return a metric with a counter for each combination of the values of `labels`."""
        counter = CounterMetricFamily(name, text, labels=[*self._labels, *labels])
        for values, count in counts.items():
            counter.add_metric([*self._values, *values], count)
        return counter

    def _histograms(self) -> Iterator[Metric]:
        for name, attribute, text in _HISTOGRAMS:
            histogram: Histogram = getattr(self._service.worker.requests, attribute)
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=self._labels)
            family.add_metric(self._values, _buckets(histogram), histogram.total)
            yield family


def count_longest_choices(requests: RequestTelemetry, answer: Answer) -> None:
    """Add the token count of each prompt's longest choice to the histogram, once the answer has ended."""
    longest: dict[int, int] = {}
    for choice, stream in zip(answer.choices, answer.streams, strict=True):
        prompt = id(choice.prompt)
        longest[prompt] = max(longest.get(prompt, 0), stream.received_tokens)
    for tokens in longest.values():
        requests.longest_choices.observe(tokens)


def _with_unit(name: str) -> str:
    """Return a counter's name as Prometheus writes it: `busy_s` becomes `busy_seconds`."""
    return name.removesuffix("_s") + "_seconds" if name.endswith("_s") else name


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return each bound with the number of values up to it, as Prometheus counts."""
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(bounds, histogram.cumulative(), strict=True))
