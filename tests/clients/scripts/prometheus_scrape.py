"""What Prometheus sees: `/metrics` before and after some requests, read by the parsers of its own library."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from harness import GIVEN, report
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics_parser

#: What scrapers accept, as they say it.
CURL = "*/*"
PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
REQUESTS = 3


def scrape(accept: str) -> tuple[str, dict[str, float]]:
    """The page's type, and the sum of each name's samples."""
    asked = urllib.request.Request(GIVEN["url"] + "/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(asked) as response:
        page, kind = response.read().decode(), response.headers["Content-Type"]
    read_page: Callable[[str], Any] = (
        openmetrics_parser.text_string_to_metric_families
        if kind.startswith("application/openmetrics-text")
        else parser.text_string_to_metric_families
    )
    families = list(read_page(page))
    samples = [sample for family in families for sample in family.samples]
    assert len({(sample.name, str(sorted(sample.labels.items()))) for sample in samples}) == len(samples)
    ours = [
        sample for sample in samples if not sample.name.startswith("process_")
    ]  # as every exporter has them
    assert all(sample.labels["model_name"] == GIVEN["model"] for sample in ours)
    read: dict[str, float] = {}
    for sample in samples:
        read[sample.name] = read.get(sample.name, 0.0) + sample.value
    return kind, read


def complete(**fields: Any) -> int:
    """Ask for a completion, and return the answer's status."""
    body = {name: GIVEN[name] for name in ("model", "prompt", "max_tokens")} | fields
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {GIVEN['key']}"}
    asked = urllib.request.Request(GIVEN["base_url"] + "/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(asked) as response:
            response.read()
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def counted(accept: str) -> Any:
    """What four requests add, one of which is refused and counts for nothing."""
    _, before = scrape(accept)
    statuses = [complete(ignore_eos=True) for _ in range(REQUESTS)] + [complete(top_p=2)]
    kind, after = scrape(accept)
    return {
        "requests": REQUESTS,
        "statuses": statuses,
        "kind": kind,
        "names": sorted(after),
        "counted": {name: value - before.get(name, 0.0) for name, value in after.items()},
    }


def text() -> Any:
    return counted(CURL)


def prometheus_2() -> Any:
    return counted(PROMETHEUS_2)


def prometheus_3() -> Any:
    return counted(PROMETHEUS_3)


report(text, prometheus_2, prometheus_3)
