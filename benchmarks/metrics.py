"""Computes a run's metrics from the timelines of its requests and from the engine's counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.results import DIGITS, Distribution, Metrics, Percentiles, RequestRecord, ServerMetrics

GOOD_SHARE = 0.99  # of a request's gaps must be within the objective for the request to count as good


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which this share of the values lies, interpolating between two values.

    Args:
        values: at least one, in any order.
        share: 0.5 is the median.
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """Return the percentiles of some values; None: there are none."""
    if not values:
        return None
    return Percentiles(
        p50=percentile(values, 0.50),
        p95=percentile(values, 0.95),
        p99=percentile(values, 0.99),
        max=max(values),
        mean=sum(values) / len(values),
    )


def distribution(values: Sequence[float], limit: int = 300) -> Distribution:
    """Reduce latencies in seconds to at most `limit` points, the smallest and the largest among them."""
    ordered = sorted(values)
    places = list(range(len(ordered)))
    if len(ordered) > limit:
        # Evenly spaced points would leave out the tail, which matters most: half of the points show the last 5 %.
        coarse, fine = limit // 2, limit - limit // 2
        bend = 0.95 * (len(ordered) - 1)
        places = sorted(
            {round(bend * step / coarse) for step in range(coarse)}
            | {round(bend + (len(ordered) - 1 - bend) * step / (fine - 1)) for step in range(fine)}
        )
    return Distribution(
        seconds=[round(ordered[place], DIGITS) for place in places], counts=[place + 1 for place in places]
    )


def is_good(record: RequestRecord, slo_ttft_s: float, slo_itl_s: float) -> bool:
    """True if a request completed with its first token in time and at least 99 % of its gaps within the limit.

    Every gap is compared with the limit. The mean of the gaps would hide a long stall that a reader notices.
    """
    if record.error is not None or record.ttft_s > slo_ttft_s:
        return False
    gaps = record.gaps_s
    return sum(gap <= slo_itl_s for gap in gaps) >= GOOD_SHARE * len(gaps)


def summarize(
    records: Sequence[RequestRecord], *, slo_ttft_s: float, slo_itl_s: float, full_length: bool = True
) -> Metrics:
    """Compute a run's metrics from the timelines of its requests, of which there is at least one.

    Latencies and throughput are those of completed requests; `errors` and `slo_attainment` count all.

    Args:
        full_length: whether answers must have `max_tokens` tokens; if so, `short` counts shorter answers.
    """
    done = [record for record in records if record.error is None]
    sent = sorted(record.sent_s for record in records if record.sent_s is not None)
    ends = [record.finished_s for record in records if record.finished_s is not None]
    duration_s = max(ends) - sent[0] if sent and ends else 0.0
    output_tokens = sum(record.completion_tokens for record in done)
    gaps = [gap for record in done for gap in record.gaps_s]
    return Metrics(
        requests=len(records),
        completed=len(done),
        errors=len(records) - len(done),
        short=sum(full_length and record.completion_tokens < record.max_tokens for record in done),
        duration_s=duration_s,
        output_tokens=output_tokens,
        prompt_tokens=sum(
            record.prompt_tokens if record.prompt_tokens_counted is None else record.prompt_tokens_counted
            for record in done
        ),
        output_tokens_per_s=_per_second(output_tokens, duration_s),
        requests_per_s=_per_second(len(done), duration_s),
        arrival_rate=(len(sent) - 1) / (sent[-1] - sent[0]) if len(sent) > 1 and sent[-1] > sent[0] else None,
        ttft_s=percentiles([record.ttft_s for record in done]),
        itl_s=percentiles(gaps),
        latency_s=percentiles([record.latency_s for record in done]),
        longest_stall_s=max(gaps, default=None),
        slo_attainment=sum(is_good(record, slo_ttft_s, slo_itl_s) for record in records) / len(records),
        slo_ttft_s=slo_ttft_s,
        slo_itl_s=slo_itl_s,
    )


def _per_second(count: int, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0


def summarize_server(
    before: dict[str, Any], after: dict[str, Any], steps: Sequence[dict[str, Any]]
) -> ServerMetrics:
    """Compute the engine's metrics between two readings of its counters.

    Args:
        before: counters when the run began.
        after: counters when it had ended.
        steps: the records of the steps in between, as far as the server still kept them.
    """
    count = {name: after[name] - before.get(name, 0) for name in after}
    decoding = [step["decode_tokens"] for step in steps if step["decode_tokens"]]
    busy_s = sum(step["duration_s"] for step in steps)

    def over_time(name: str) -> float:
        return sum(step[name] * step["duration_s"] for step in steps) / busy_s if busy_s > 0 else 0.0

    return server_metrics(
        count,
        mean_batch=sum(decoding) / len(decoding) if decoding else 0.0,
        kv_used_mean=over_time("kv_used_tokens"),
        kv_used_max=max((step["kv_used_tokens"] for step in steps), default=0),
        kv_reserved_mean=over_time("kv_reserved_tokens"),
        kv_reserved_max=max((step["kv_reserved_tokens"] for step in steps), default=0),
        missing_steps=count["steps"] - len(steps),
    )


def server_metrics(count: Mapping[str, Any], **of_steps: Any) -> ServerMetrics:
    """Return the engine's metrics, with the shares of wasted work and of cached prompt tokens.

    Args:
        count: the engine's counters, for this run alone.
        of_steps: fields of `ServerMetrics` that the caller has computed from the steps.
    """
    wasted = count["padded_tokens"] + count["idle_rows"]
    computed = count["decode_tokens"] + count["prefill_tokens"] + wasted
    same = ("steps", "decode_tokens", "prefill_tokens", "padded_tokens", "idle_rows", "preemptions", "busy_s")
    return ServerMetrics(
        **{name: count[name] for name in same},
        padded_share=wasted / computed if computed else 0.0,
        cached_share=count["cached_tokens"] / count["prompt_tokens"] if count.get("prompt_tokens") else 0.0,
        evictions=count.get("evictions", 0),
        **of_steps,
    )
