"""Skips the server's tests that do not hold for a cluster, with the reason, and those that need no repetition."""

from __future__ import annotations

import pytest

from tests.server.conftest import prefix  # noqa: F401 - a fixture of the tests that run here
from tests.support.servers import PHASES

OTHERWISE = {
    "test_health_version_and_telemetry": "steps are under `replicas` in /telemetry, each engine's own",
    "test_a_wrong_method_names_the_allowed_ones": "Serve's proxy itself refuses methods that HTTP does not have",
}
#: A table of values that a replica refuses. The front forwards all refusals alike: one is enough.
TABLES = {"test_refusals.py::test_a_refusal_names_its_field"}
_begun: set[str] = set()  # tables with a case that has run


@pytest.fixture(autouse=True)
def holds_for_a_cluster(request: pytest.FixtureRequest) -> None:
    if "server" not in request.fixturenames:
        pytest.skip("asks an app or a server of its own, not the cluster")
    if reason := OTHERWISE.get(request.function.__name__):
        pytest.skip(reason)
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and callspec.params.get("phase") in PHASES[1:]:
        pytest.skip("this cluster is of one phase")
    table = request.node.nodeid.partition("[")[0].rpartition("/")[2]
    if table in TABLES & _begun:
        pytest.skip("the front has forwarded a refusal of this table")
    _begun.add(table)


@pytest.fixture
def gated() -> None:
    pytest.skip("passes are broken from inside a server's process")
