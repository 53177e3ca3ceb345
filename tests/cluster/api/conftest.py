"""Which of a server's tests do not hold for a cluster, and why."""

from __future__ import annotations

import pytest

from tests.server.support import PHASES

OTHERWISE = {
    "test_health_version_and_telemetry": "steps are under `replicas` in /telemetry, each engine's own",
    "test_telemetry_is_read_page_by_page_while_steps_go_on": "the same",
    "test_a_wrong_key": "this cluster wants no key; `tests/cluster/test_cluster.py` has one that does",
    "test_refusals_are_400": "reads the log, which replicas write to Ray's files",
}


@pytest.fixture(autouse=True)
def holds_for_a_cluster(request: pytest.FixtureRequest) -> None:
    if reason := OTHERWISE.get(request.function.__name__):
        pytest.skip(reason)
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("phase") in PHASES[1:]:
        pytest.skip("this cluster is of one phase")


@pytest.fixture
def gated() -> None:
    pytest.skip("passes are broken from inside a server's process")
