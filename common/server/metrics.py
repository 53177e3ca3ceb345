"""`GET /metrics`: the counts of the engine, in Prometheus's format.

A metric that vLLM has, too, has vLLM's name, so dashboards made for vLLM show it. The names of other metrics begin
with `infer:`, or with `process_` if they are about this process.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from common.engine.telemetry import Counters, Histogram, RequestTelemetry
from common.server.api.answer import Answer
from common.server.service import Service

#: Memory, processor time and open files of this process: `process_*`, without labels, as every exporter has them.
_PROCESS = ProcessCollector(registry=None)

#: The engine's counters that vLLM has, too: vLLM's name for each, and its help text.
_VLLM_COUNTERS = {
    "prompt_tokens": ("vllm:prompt_tokens", "Prompt tokens of requests whose computation has begun"),
    "preemptions": ("vllm:num_preemptions", "Requests that lost their seat and memory and began anew"),
    "drafts": ("vllm:spec_decode_num_drafts", "Runs of guessed tokens that were verified"),
    "draft_tokens": ("vllm:spec_decode_num_draft_tokens", "Guessed tokens that were verified"),
    "accepted_tokens": ("vllm:spec_decode_num_accepted_tokens", "Guessed tokens that came true"),
}

#: The histograms, all with vLLM's names: an attribute of `RequestTelemetry`, the name after `vllm:`, the help text.
_HISTOGRAMS = (
    ("time_to_first_token_s", "time_to_first_token_seconds", "From submission to the first token"),
    ("inter_token_latency_s", "inter_token_latency_seconds", "From one token to the next"),
    (
        "inter_token_latency_s",
        "time_per_output_token_seconds",
        "The same, under the name of older dashboards",
    ),
    ("end_to_end_s", "e2e_request_latency_seconds", "From submission to the end"),
    ("queue_s", "request_queue_time_seconds", "From submission to the beginning of the prefill"),
    ("prefill_s", "request_prefill_time_seconds", "From there to the first token"),
    ("decode_s", "request_decode_time_seconds", "From the first token to the last"),
    ("inference_s", "request_inference_time_seconds", "From the beginning of the prefill to the last token"),
    (
        "between_tokens_s",
        "request_time_per_output_token_seconds",
        "Mean of the times between a request's tokens",
    ),
    ("computed_lengths", "request_prefill_kv_computed_tokens", "Prompt tokens not found in the prefix cache"),
    ("choices", "request_params_n", "Choices of a prompt"),
    ("most_new_tokens", "request_params_max_tokens", "The most new tokens that a choice may have"),
    ("prompt_lengths", "request_prompt_tokens", "Prompt tokens of a request"),
    ("answer_lengths", "request_generation_tokens", "New tokens of a request"),
    ("longest_choices", "request_max_num_generation_tokens", "New tokens of a prompt's longest choice"),
)

#: Pages may take a twentieth of the event loop's time, and more for some seconds. Clients that ask in a loop, for
#: which they need no key, get the latest page again. A scraper gets a new page each time.
PAGE_SHARE, BURST_S = 1 / 20, 1.0


class Metrics(Collector):
    """The metrics of one server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._page = b""
        self._due_s = 0.0  # when the next page may be made, on the clock of `time.monotonic`
        self._labels = {"model_name": service.model_name, "phase": service.engine.facts.phase.slug}

    def render(self) -> tuple[bytes, str]:
        """Return the metrics in Prometheus's text format, which every scraper reads, and the format's content type.

        If clients ask very often, the page may be some milliseconds old (`PAGE_SHARE`).

        OpenMetrics is not offered. In that format `prometheus_client` writes `vllm_` for `vllm:`, and dashboards
        made for vLLM's names find nothing.
        """
        encode, content_type = choose_encoder("text/plain; version=0.0.4")
        now_s = time.monotonic()
        if now_s >= self._due_s:
            began_s = time.thread_time()
            self._page = encode(self)
            took_s = time.thread_time() - began_s
            self._due_s = max(self._due_s, now_s - BURST_S) + took_s / PAGE_SHARE
        return self._page, content_type

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()
        yield from _PROCESS.collect()

    def _gauges(self) -> Iterator[Metric]:
        engine = self._service.engine
        facts = engine.facts
        config = facts.config
        latest, waiting = engine.latest_step, engine.num_waiting()
        block = getattr(config, "block_size", facts.max_seq_len)  # in a phase without blocks: a slot
        cache: dict[str, object] = {
            "block_size": block,
            "num_gpu_blocks": config.kv_tokens() // block,
            "enable_prefix_caching": getattr(config, "enable_prefix_caching", False),
            "cache_dtype": facts.dtype,
        }
        named: dict[str, object] = {"dtype": facts.dtype, "weights": facts.weight_dtype}
        saved_s = engine.telemetry.counters.tier_saved_s
        used = latest.kv_reserved_tokens / config.kv_tokens()
        gauges: tuple[tuple[str, str, dict[str, object], float], ...] = (
            ("infer:model_info", "1; the labels say what is served", named, 1),
            ("vllm:cache_config_info", "1; the labels say how large the KV memory is", cache, 1),
            ("vllm:num_requests_running", "Requests that hold KV memory", {}, latest.active),
            ("vllm:num_requests_waiting", "Requests that queue", {}, waiting),
            ("vllm:num_requests_waiting_by_reason", "Requests that queue", {"reason": "capacity"}, waiting),
            ("infer:tier_saved_seconds", "`tier_saved_s` of /telemetry; it may fall", {}, saved_s),
            ("vllm:kv_cache_usage_perc", "Share of the KV memory that is held; 1 is all of it", {}, used),
        )
        for name, text, own, value in gauges:
            labels = {**self._labels, **own}
            gauge = GaugeMetricFamily(name, text, labels=list(labels))
            gauge.add_metric([str(each) for each in labels.values()], value)
            yield gauge

    def _counters(self) -> Iterator[Metric]:
        counters, requests = self._service.engine.telemetry.counters, self._service.engine.requests
        yield self._counter(
            "vllm:generation_tokens", "Tokens that were handed to clients", requests.generation_tokens
        )
        yield self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens of admitted requests", counters.prompt_tokens
        )
        yield self._counter(
            "vllm:prefix_cache_hits", "Prompt tokens that were found there", counters.cached_tokens
        )
        yield self._counters_by(
            ("finished_reason",),
            "vllm:request_success",
            "Requests that ended",
            {(reason,): count for reason, count in requests.ended.items()},
        )
        yield self._counters_by(
            ("status", "reason"),
            "infer:http_answers",
            "HTTP answers, by the code of their error",
            self._service.answers,
        )
        yield self._counters_by(
            ("position",),
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Guessed tokens that came true, by their place in a run; the first is 0",
            {(place,): count for place, count in enumerate(self._service.engine.telemetry.accepted_at)},
        )
        for field in dataclasses.fields(Counters):
            if field.name == "tier_saved_s":  # it may fall: a gauge
                continue
            name, text = _VLLM_COUNTERS.get(
                field.name, (f"infer:{_with_unit(field.name)}", f"`{field.name}` of /telemetry")
            )
            yield self._counter(name, text, getattr(counters, field.name))

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._counters_by((), name, text, {(): value})

    def _counters_by(
        self, labels: Sequence[str], name: str, text: str, counts: Mapping[Any, float]
    ) -> Metric:
        """Return a counter for each value of these labels, which stand behind those of all metrics."""
        family = CounterMetricFamily(name, text, labels=[*self._labels, *labels])
        for values, count in counts.items():
            family.add_metric([*self._labels.values(), *map(str, values)], count)
        return family

    def _histograms(self) -> Iterator[Metric]:
        requests, step_tokens = self._service.engine.requests, self._service.engine.telemetry.step_tokens
        yield self._histogram("iteration_tokens_total", "Prompt and new tokens of a step", step_tokens)
        for field, name, text in _HISTOGRAMS:
            yield self._histogram(name, text, getattr(requests, field))

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), _buckets(histogram), histogram.total)
        return family


def count_choices(requests: RequestTelemetry, answer: Answer) -> None:
    """Count the choices of each prompt, their most new tokens, and the new tokens of each prompt's longest choice.

    Call this once for an answer, when it has ended or was cancelled.
    """
    lengths: dict[int, list[int]] = {}  # of the choices of each prompt
    for choice, stream in zip(answer.choices, answer.streams, strict=True):
        lengths.setdefault(id(choice.prompt), []).append(stream.received_tokens)
        requests.most_new_tokens.observe(stream.request.params.max_new_tokens)
    for each in lengths.values():
        requests.choices.observe(len(each))
        requests.longest_choices.observe(max(each))


def _with_unit(name: str) -> str:
    """Return a counter's name with its unit as Prometheus writes units: `busy_s` becomes `busy_seconds`."""
    return name.removesuffix("_s") + "_seconds" if name.endswith("_s") else name


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return each bound of a histogram, and `+Inf`, with the number of observed values up to that bound."""
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(bounds, histogram.cumulative(), strict=True))
