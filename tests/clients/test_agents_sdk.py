"""`openai-agents`, OpenAI's Agents SDK: its loop, over responses."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.support import AGENTS_SDK, part

TOOL = AGENTS_SDK
SCRIPT = "agents_sdk.py"
pytestmark = [
    pytest.mark.clients,
    pytest.mark.parametrize("phase", [5, 8, 9, 10], indirect=True, scope="session"),
]
#: The loop: a call, its output, and an answer that has read it.
ITEMS = ["tool_call_item", "tool_call_output_item", "message_output_item"]


def assert_used(said: dict[str, Any]) -> None:
    ((place, brave),) = said["calls"]
    assert place in ("forest", "river")
    assert isinstance(brave, bool)
    assert (said["items"], said["requests"]) == (ITEMS, 2)
    assert said["text"]
    prompt, new, total = said["usage"]
    assert prompt + new == total


def test_a_loop_with_a_tool(report: dict[str, Any]) -> None:
    """`Runner.run` of an agent with one tool: a call, its output, an answer."""
    assert_used(part(report, "loop"))


def test_a_streamed_loop(report: dict[str, Any]) -> None:
    """`Runner.run_streamed` of the same agent."""
    said = part(report, "streamed")
    assert_used(said)
    assert "".join(said["pieces"]) == said["text"]
    assert len(said["pieces"]) > 3
    assert said["calls"] == part(report, "loop")["calls"]


def test_refusals(report: dict[str, Any]) -> None:
    """A refusal as an exception, and the next loop."""
    said = part(report, "refusals")
    assert "BadRequestError" in said["value"]["types"]
    assert_used(said["next"])
