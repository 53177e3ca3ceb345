"""`anthropic`, Anthropic's library for Python."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.support import ANTHROPIC, assert_same, chatted, part
from tests.server.support import ServerProcess

TOOL = ANTHROPIC
SCRIPT = "anthropic_messages.py"
pytestmark = pytest.mark.clients


def test_messages(report: dict[str, Any], server: ServerProcess) -> None:
    """Messages, whole and streamed, and their tokens counted."""
    expected = chatted(server)
    assert_same(part(report, "whole"), expected)
    assert_same(part(report, "streamed"), expected)
    assert part(report, "whole")["stop_reason"] in ("max_tokens", "end_turn")
    assert part(report, "counted") == expected["usage"][0]


def test_a_loop_with_a_tool(report: dict[str, Any]) -> None:
    """A forced call, its result, an answer; and the library's own loop (`tool_runner`)."""
    said = part(report, "loop")
    assert said["stop_reason"] == "tool_use"
    assert said["text"]
    for calls in (said["calls"], part(report, "runner")["calls"]):
        ((place, brave),) = calls
        assert place in ("forest", "river")
        assert isinstance(brave, bool)


def test_refusals(report: dict[str, Any], server: ServerProcess) -> None:
    """Refusals as the library's exceptions, and the next request."""
    said = part(report, "refusals")
    assert "AuthenticationError" in said["key"]["types"]
    assert "BadRequestError" in said["value"]["types"]
    assert "NotFoundError" in said["model"]["types"]
    assert_same(said["next"], chatted(server))
