"""LangGraph: graphs of a model and a tool."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.support import LANGGRAPH, assert_same, chatted, part
from tests.server.support import ServerProcess

TOOL = LANGGRAPH
SCRIPT = "langgraph_agent.py"
pytestmark = [
    pytest.mark.clients,
    pytest.mark.parametrize("phase", [5, 8, 10], indirect=True, scope="session"),
]


def test_a_loop_with_a_tool(report: dict[str, Any]) -> None:
    """Two turns of a graph with a memory: a forced call, its result and an answer in each."""
    said = part(report, "loop")
    assert said["messages"] == ["human", "ai", "tool", "ai"] * 2
    assert len(said["calls"]) == 2
    assert all(said["turns"])


def test_a_streamed_graph(report: dict[str, Any], server: ServerProcess) -> None:
    """A graph's messages, streamed."""
    said = part(report, "streamed")
    assert_same(said, {"text": chatted(server, max_tokens=120)["text"]})
