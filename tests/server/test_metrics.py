"""`/metrics`, read by Prometheus's own parsers."""

from __future__ import annotations

import math

import httpx
import pytest
from prometheus_client import parser

from tests.server.conftest import CACHING
from tests.server.support import HANG_S, ServerProcess, eventually
from tests.server.test_lifecycle import QUEUE, hold_a_full_batch, in_background, post

HISTOGRAMS = (
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
)


def scrape(server: ServerProcess) -> dict[str, float]:
    """Every sample's value, by its name and the labels that are its own."""
    response = server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    samples = {}
    for family in parser.text_string_to_metric_families(response.text):
        assert family.documentation
        for sample in family.samples:
            own = {**sample.labels}
            assert own.pop("model_name") == server.model
            assert own.pop("phase").startswith("phase")
            key = sample.name + "".join(f" {name}={value}" for name, value in own.items())
            assert key not in samples
            samples[key] = sample.value
    return samples


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


def test_what_a_request_adds(server: ServerProcess, phase: str) -> None:
    before = scrape(server)
    prompt = list(range(300, 340))
    server.complete(prompt=prompt, max_tokens=5, ignore_eos=True)
    server.complete(prompt=prompt, max_tokens=3, n=2, ignore_eos=True)
    found = 32 if phase in CACHING else 0
    added = grown(before, scrape(server))
    assert added["vllm:prompt_tokens_total"] == 120
    assert added["vllm:prefix_cache_queries_total"] == 120
    assert added.get("vllm:prefix_cache_hits_total", 0) == 2 * found
    assert added["vllm:generation_tokens_total"] == 11
    assert added["vllm:request_success_total finished_reason=length"] == 3
    assert added["infer:requests_finished_total"] == 3
    assert added["infer:busy_seconds_total"] > 0
    counts = [added[f"{name}_count"] for name in HISTOGRAMS]
    assert counts == [3, 8, 8, 3]
    assert added["vllm:time_to_first_token_seconds_sum"] > 0
    assert (
        added["vllm:time_to_first_token_seconds_sum"] < added["vllm:e2e_request_latency_seconds_sum"] < HANG_S
    )


def test_buckets_add_up(server: ServerProcess) -> None:
    server.complete()
    samples = scrape(server)
    for name in HISTOGRAMS:
        bounds, counts = zip(
            *(
                (float(key.partition("le=")[2]), value)
                for key, value in samples.items()
                if key.startswith(f"{name}_bucket")
            ),
            strict=True,
        )
        assert list(bounds) == sorted(bounds)
        assert list(counts) == sorted(counts)
        assert bounds[-1] == math.inf
        assert counts[-1] == samples[f"{name}_count"]


def test_how_requests_end(gated: ServerProcess) -> None:
    before = scrape(gated)
    text = gated.complete(max_tokens=8, ignore_eos=True)["choices"][0]["text"]
    gated.complete(max_tokens=8, stop=[text[3:9]])
    gated.order("fail")
    gated.post()
    gated.order("heal")
    with gated.raw(stream=True, max_tokens=1000, ignore_eos=True) as connection:
        assert b"200 OK" in connection.recv(4096)
    name = "vllm:request_success_total finished_reason="
    eventually(lambda: grown(before, scrape(gated)).get(f"{name}abort") == 1)
    added = grown(before, scrape(gated))
    assert [added[name + reason] for reason in ("length", "stop", "error")] == [1, 1, 1]


def test_who_runs_and_who_waits(gated: ServerProcess) -> None:
    with gated.streaming(max_tokens=1000, ignore_eos=True) as events:
        next(events)
        eventually(lambda: scrape(gated)["vllm:num_requests_running"] == 1)
        assert 0 < scrape(gated)["vllm:kv_cache_usage_perc"] <= 1
    eventually(lambda: scrape(gated)["vllm:num_requests_running"] == 0)
    eventually(lambda: scrape(gated)["vllm:kv_cache_usage_perc"] == 0)
    batch = hold_a_full_batch(gated)
    crowd = in_background(QUEUE, lambda _: post(gated))
    eventually(lambda: scrape(gated)["vllm:num_requests_waiting"] == QUEUE)
    gated.order("open")
    for each in (batch, *crowd):
        assert each.result(HANG_S).status_code == 200
    assert scrape(gated)["vllm:num_requests_waiting"] == 0


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        "text/plain",
        "*/*",
    ],
)
def test_names_are_vllms_whatever_a_scraper_prefers(server: ServerProcess, accept: str) -> None:
    response = httpx.get(f"{server.url}/metrics", headers={"Accept": accept})
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "vllm:num_requests_running{" in response.text
