"""`/metrics`, read by Prometheus's own parsers."""

from __future__ import annotations

import pytest
from prometheus_client import parser

from common.server import metrics
from tests.conftest import OwnPrompt
from tests.support.servers import (
    HANG_S,
    QUEUE,
    ServerProcess,
    app_with,
    assert_error,
    eventually,
    hold_a_full_batch,
    in_background,
)

HISTOGRAMS = (
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_max_num_generation_tokens",
    "vllm:request_inference_time_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:request_prefill_kv_computed_tokens",
    "vllm:request_params_n",
    "vllm:request_params_max_tokens",
)


def scrape(server: ServerProcess) -> dict[str, float]:
    """Return every sample's value, by its name and its labels except `model_name` and `phase`."""
    response = server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    samples = {}
    for family in parser.text_string_to_metric_families(response.text):
        assert family.documentation
        for sample in family.samples:
            if family.name.startswith("process_"):  # the standard metrics of a process have no labels
                assert not sample.labels
                samples[sample.name] = sample.value
                continue
            own = {**sample.labels}
            assert own.pop("model_name") == server.model
            assert own.pop("phase").startswith("phase")
            key = sample.name + "".join(f" {name}={value}" for name, value in own.items())
            assert key not in samples
            samples[key] = sample.value
    return samples


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Return the changes of samples. A sample with labels appears when it first counts something."""
    return {
        name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)
    }


def test_info_metrics_describe_the_model(server: ServerProcess) -> None:
    samples = scrape(server)
    assert samples["infer:model_info dtype=float32 weights=float32"] == 1
    (cache,) = (name for name in samples if name.startswith("vllm:cache_config_info"))
    labels = dict(label.split("=") for label in cache.split()[1:])
    assert int(labels["block_size"]) * int(labels["num_gpu_blocks"]) >= 1024
    assert labels["enable_prefix_caching"] == "True"
    assert labels["cache_dtype"] == "float32"
    assert samples["vllm:num_requests_waiting_by_reason reason=capacity"] == 0
    assert server.client.get("/openai/metrics").status_code == 200


def test_a_request_updates_counters_and_histograms(server: ServerProcess, own_prompt: OwnPrompt) -> None:
    server.begin_test()
    before = scrape(server)
    prompt = own_prompt(40)
    server.complete(prompt=prompt, max_tokens=5, ignore_eos=True)
    server.complete(prompt=prompt, max_tokens=3, n=2, ignore_eos=True)
    assert_error(server.post(top_p=2), 422, "top_p")  # a refusal adds nothing
    found = 32  # two blocks of the prompt
    added = grown(before, scrape(server))
    assert added["vllm:prompt_tokens_total"] == 120
    assert added["vllm:prefix_cache_queries_total"] == 120
    assert added.get("vllm:prefix_cache_hits_total", 0) == 2 * found
    assert added["vllm:generation_tokens_total"] == 11
    assert added["vllm:request_success_total finished_reason=length"] == 3
    assert added["infer:requests_finished_total"] == 3
    assert added["infer:busy_seconds_total"] > 0
    counts = [added[f"{name}_count"] for name in HISTOGRAMS]
    assert counts == [3, 8, 8, 3, 3, 3, 3, 3, 3, 2, 3, 3, 3, 2, 3]
    assert added["vllm:iteration_tokens_total_count"] == added["infer:steps_total"]
    assert added["vllm:iteration_tokens_total_sum"] == (
        added["infer:prefill_tokens_total"] + added["infer:decode_tokens_total"]
    )
    assert added["vllm:request_prefill_kv_computed_tokens_sum"] == 120 - 2 * found
    assert added["vllm:request_params_n_sum"] == 1 + 2
    assert added["vllm:request_params_max_tokens_sum"] == 5 + 3 + 3
    assert added["vllm:time_to_first_token_seconds_sum"] > 0
    assert (
        added["vllm:time_to_first_token_seconds_sum"] < added["vllm:e2e_request_latency_seconds_sum"] < HANG_S
    )
    # The stages of a request do not overlap.
    stages = ("queue", "prefill", "decode")
    in_stages = sum(added.get(f"vllm:request_{stage}_time_seconds_sum", 0) for stage in stages)
    assert 0 < in_stages <= added["vllm:e2e_request_latency_seconds_sum"]
    assert in_stages > added["vllm:request_decode_time_seconds_sum"] > 0
    assert added["vllm:request_prompt_tokens_sum"] == 120
    assert added["vllm:request_generation_tokens_sum"] == 11
    assert added["vllm:request_max_num_generation_tokens_sum"] == 5 + 3  # the longest choice of each request


def test_answers_are_counted_by_status_and_reason(server: ServerProcess) -> None:
    before = scrape(server)
    assert_error(server.post(temperature=-1), 422, "temperature")
    assert_error(server.client.get("/nowhere"), 404)
    for _ in range(2):
        server.client.get("/health")
    assert_error(server.client.get("/health", headers={"x-request-id": "a b"}), 400)
    with server.raw() as connection:
        while b"HTTP" not in connection.recv(4096):
            pass
        connection.sendall(b"no HTTP\r\n\r\n")
        while connection.recv(4096):
            pass
    added = grown(before, scrape(server))
    answers = {
        name.removeprefix("infer:http_answers_total "): count
        for name, count in added.items()
        if name.startswith("infer:http_answers_total ")
    }
    assert answers.pop("reason= status=200") >= 1 + 2 + 1  # a scrape, /health twice, a stream
    assert answers == {
        "reason=invalid_value status=422": 1,
        "reason=not_found status=404": 1,
        "reason=invalid_request_id status=400": 1,
        "reason=invalid_http status=400": 1,
    }


def test_finish_reasons_are_counted(gated: ServerProcess) -> None:
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


def test_running_and_waiting_requests_are_gauges(gated: ServerProcess) -> None:
    with gated.streaming(max_tokens=1000, ignore_eos=True) as events:
        next(events)
        eventually(lambda: scrape(gated)["vllm:num_requests_running"] == 1)
        assert 0 < scrape(gated)["vllm:kv_cache_usage_perc"] <= 1
    eventually(lambda: scrape(gated)["vllm:num_requests_running"] == 0)
    eventually(lambda: scrape(gated)["vllm:kv_cache_usage_perc"] == 0)
    batch = hold_a_full_batch(gated)
    crowd = in_background(QUEUE, lambda _: gated.post())
    eventually(lambda: scrape(gated)["vllm:num_requests_waiting"] == QUEUE)
    gated.order("open")
    for each in (batch, *crowd):
        assert each.result(HANG_S).status_code == 200
    eventually(lambda: scrape(gated)["vllm:num_requests_waiting"] == 0)


def test_no_counter_falls() -> None:
    """Reading the file of phase 11 may take longer than computing its blocks. Prometheus takes a counter that falls
    for one that began anew."""
    with app_with("phase11_tiered") as client:
        client.app.state.server.engine.telemetry.counters.tier_saved_s = -0.5  # type: ignore[attr-defined]
        families = list(parser.text_string_to_metric_families(client.get("/metrics").text))
    falling = [family for family in families if any(each.value == -0.5 for each in family.samples)]
    assert [(family.name, family.type) for family in falling] == [("infer:tier_saved_seconds", "gauge")]


def test_names_are_vllms_whatever_a_scraper_prefers(server: ServerProcess) -> None:
    """A scraper may ask for another format, as Prometheus 3 does."""
    accept = (
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3"
    )
    response = server.client.get("/metrics", headers={"Accept": accept})
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "vllm:num_requests_running{" in response.text


def test_clients_that_ask_in_a_loop_get_the_same_page_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first page is new, and so is one after a while. In between, clients take a bounded share of the time."""
    with app_with() as client:
        pages = [client.get("/metrics").text for _ in range(3)]
        assert len(set(pages)) == 3, "each counts the one before it"
        monkeypatch.setattr(metrics, "BURST_S", 0.0)
        monkeypatch.setattr(metrics, "PAGE_SHARE", 1e-6)
        client.app.state.metrics._due_s = 0.0  # type: ignore[attr-defined]
        assert len({client.get("/metrics").text for _ in range(3)}) == 1
        client.app.state.metrics._due_s = 0.0  # type: ignore[attr-defined]
        assert client.get("/metrics").text not in pages
