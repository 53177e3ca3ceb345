"""`GET /metrics`: what the engine and its worker have counted, as Prometheus reads it.

Names are vLLM's where vLLM has the number, so that dashboards made for it show ours; the rest begin with `infer:`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from common.server.service import Service
from common.telemetry import Counters, Histogram

#: The engine's counters that have a name of vLLM's.
_VLLM_COUNTERS = {
    "prompt_tokens": ("vllm:prompt_tokens", "Prompt tokens of requests whose computation has begun"),
    "preemptions": ("vllm:num_preemptions", "Requests that lost their memory to others and began anew"),
}


class Metrics(Collector):
    """The numbers of one server, read anew for each scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._labels = {"model_name": service.model_name, "phase": service.engine.phase.slug}

    def render(self) -> tuple[bytes, str]:
        """The page, and the name of its format: the one that every scraper reads.

        Whatever a scraper would like better: in OpenMetrics, the library writes `vllm_` for `vllm:`, and dashboards
        made for vLLM's names find nothing.
        """
        encode, content_type = choose_encoder("text/plain; version=0.0.4")
        return encode(self), content_type

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        engine, worker = self._service.engine, self._service.worker
        latest = engine.telemetry.latest
        used = latest.kv_reserved_tokens / engine.config.kv_tokens()
        for name, text, value in (
            ("vllm:num_requests_running", "Requests that hold KV memory", latest.active),
            ("vllm:num_requests_waiting", "Requests that queue", worker.num_waiting()),
            ("vllm:kv_cache_usage_perc", "Share of the KV memory that is held; 1 is all of it", used),
        ):
            gauge = GaugeMetricFamily(name, text, labels=list(self._labels))
            gauge.add_metric(list(self._labels.values()), value)
            yield gauge

    def _counters(self) -> Iterator[Metric]:
        counters, requests = self._service.engine.telemetry.counters, self._service.worker.requests
        yield self._counter(
            "vllm:generation_tokens", "Tokens that were handed to clients", requests.generation_tokens
        )
        yield self._counter(
            "vllm:prefix_cache_queries",
            "Prompt tokens that were looked for in the prefix cache",
            counters.prompt_tokens,
        )
        yield self._counter(
            "vllm:prefix_cache_hits", "Prompt tokens that were found there", counters.cached_tokens
        )
        ended = CounterMetricFamily(
            "vllm:request_success", "Requests that ended", labels=[*self._labels, "finished_reason"]
        )
        for reason, count in requests.ended.items():
            ended.add_metric([*self._labels.values(), reason], count)
        yield ended
        for field in dataclasses.fields(Counters):
            name, text = _VLLM_COUNTERS.get(
                field.name, (f"infer:{_with_unit(field.name)}", f"`{field.name}` of /telemetry")
            )
            yield self._counter(name, text, getattr(counters, field.name))

    def _counter(self, name: str, text: str, value: float) -> Metric:
        counter = CounterMetricFamily(name, text, labels=list(self._labels))
        counter.add_metric(list(self._labels.values()), value)
        return counter

    def _histograms(self) -> Iterator[Metric]:
        requests = self._service.worker.requests
        between = "From one token of a request to its next, in seconds"
        for name, text, histogram in (
            (
                "vllm:time_to_first_token_seconds",
                "From a request's submission to its first token",
                requests.time_to_first_token_s,
            ),
            ("vllm:inter_token_latency_seconds", between, requests.inter_token_latency_s),
            # The older name of the same, which older dashboards have.
            ("vllm:time_per_output_token_seconds", between, requests.inter_token_latency_s),
            (
                "vllm:e2e_request_latency_seconds",
                "From a request's submission to its end",
                requests.end_to_end_s,
            ),
        ):
            family = HistogramMetricFamily(name, text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), _buckets(histogram), histogram.total)
            yield family


def _with_unit(name: str) -> str:
    """A counter's name as Prometheus writes one: `busy_s` is `busy_seconds`."""
    return name.removesuffix("_s") + "_seconds" if name.endswith("_s") else name


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Prometheus counts, for each bound, all that is not above it."""
    bounds = [*map(str, histogram.BOUNDS), "+Inf"]
    return list(zip(bounds, histogram.cumulative(), strict=True))
