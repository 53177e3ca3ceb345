"""`smolagents`: an agent that calls tools in every step."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.support import SMOLAGENTS, part

TOOL = SMOLAGENTS
SCRIPT = "smolagents_agent.py"
pytestmark = [
    pytest.mark.clients,
    pytest.mark.parametrize("phase", [5, 8, 10], indirect=True, scope="session"),
]


def test_a_loop_with_a_tool(report: dict[str, Any]) -> None:
    """`ToolCallingAgent`: required calls, step after step, to a final answer."""
    said = part(report, "loop")
    assert said["calls"]
    assert set(said["calls"]) <= {"find_fox", "final_answer"}
    assert said["answer"]
    assert said["tokens"] > 0
