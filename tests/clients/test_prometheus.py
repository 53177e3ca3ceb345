"""`/metrics`, read by the parsers of Prometheus' library."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.support import MAX_TOKENS, PROMETHEUS, part
from tests.server.support import ServerProcess

TOOL = PROMETHEUS
SCRIPT = "prometheus_scrape.py"
pytestmark = pytest.mark.clients


def assert_counted(said: dict[str, Any], server: ServerProcess) -> None:
    """What some requests add, and no refused one."""
    requests, counted = said["requests"], said["counted"]
    assert said["statuses"] == [200] * requests + [400]
    assert counted["vllm:request_success_total"] == requests
    assert counted["vllm:generation_tokens_total"] == requests * MAX_TOKENS
    assert counted["vllm:prompt_tokens_total"] == requests * server.complete()["usage"]["prompt_tokens"]
    for histogram in ("vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"):
        assert counted[f"{histogram}_count"] == requests
        assert counted[f"{histogram}_sum"] > 0
    assert counted["vllm:inter_token_latency_seconds_count"] == requests * (MAX_TOKENS - 1)
    for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert gauge in said["names"]


def test_text(report: dict[str, Any], server: ServerProcess) -> None:
    """`/metrics` as text, through its parser, before and after four requests, one of them refused."""
    said = part(report, "text")
    assert said["kind"].startswith("text/plain")
    assert_counted(said, server)


def test_prometheus_2(report: dict[str, Any], server: ServerProcess) -> None:
    """`/metrics` as Prometheus 2 asks for it, under vLLM's names, around the same requests."""
    assert_counted(part(report, "prometheus_2"), server)


def test_prometheus_3(report: dict[str, Any], server: ServerProcess) -> None:
    """`/metrics` as Prometheus 3 asks for it, under vLLM's names, around the same requests."""
    assert_counted(part(report, "prometheus_3"), server)
