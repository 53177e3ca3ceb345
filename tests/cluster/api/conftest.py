"""Which of a server's tests do not hold for a cluster, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent

OTHERWISE = {
    "test_health_version_and_telemetry": "steps are under `replicas` in /telemetry, each engine's own",
    "test_telemetry_is_read_page_by_page_while_steps_go_on": "the same",
    "test_refusals_are_400": "reads the log, which replicas write to Ray's files",
}
#: A server whose tests break passes from inside its process. A cluster has no such fixture.
INSIDE = "gated"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [
        item
        for item in items
        if HERE not in item.path.parents
        or (
            item.name not in OTHERWISE
            and getattr(item, "originalname", "") not in OTHERWISE
            and INSIDE not in getattr(item, "fixturenames", ())
        )
    ]
