"""`@openai/agents`: OpenAI's Agents SDK for JavaScript."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.support import AGENTS_SDK_NODE, part

TOOL = AGENTS_SDK_NODE
SCRIPT = "agents_sdk_node.mjs"
pytestmark = [
    pytest.mark.clients,
    pytest.mark.parametrize("phase", [5, 8, 10], indirect=True, scope="session"),
]


@pytest.mark.parametrize("route", ["responses", "chat"])
def test_two_turns(report: dict[str, Any], route: str) -> None:
    """Two turns of an agent with one tool, by responses and by chat: the history is sent back as it came."""
    said = part(report, route)
    assert said["items"] == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    assert len(said["called"]) == 2
    assert said["first"]
    assert said["second"]


def test_a_streamed_loop(report: dict[str, Any]) -> None:
    """The same loop, streamed."""
    said = part(report, "responses_stream")
    assert "".join(said["pieces"]) == said["text"] == part(report, "responses")["first"]
    assert len(said["pieces"]) > 3
