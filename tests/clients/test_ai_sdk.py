"""Vercel's AI SDK, in Node: completions, chat, responses and messages."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.support import AI_SDK, assert_same, chatted, part
from tests.server.support import ServerProcess

TOOL = AI_SDK
SCRIPT = "ai_sdk.mjs"
pytestmark = [
    pytest.mark.clients,
    pytest.mark.parametrize("phase", [5, 8, 10], indirect=True, scope="session"),
]


def test_text(report: dict[str, Any], server: ServerProcess) -> None:
    """`generateText` and `streamText` by completions, chat, responses and Anthropic's messages."""
    assert part(report, "completion")["text"]  # the library writes roles around the prompt
    for route in ("chat", "responses", "messages"):
        assert_same(part(report, route), chatted(server))
        assert_same(part(report, f"{route}_stream"), chatted(server))


@pytest.mark.parametrize("route", ["chat", "responses", "messages"])
def test_a_loop_with_a_tool(report: dict[str, Any], route: str) -> None:
    """A forced call, its result, an answer that has read it, on the three routes that have tools."""
    said = part(report, f"{route}_loop")
    ((place, brave),) = said["called"]
    assert place in ("forest", "river")
    assert isinstance(brave, bool)
    assert said["steps"][0] == "tool-calls"
    assert said["text"]


def test_an_object(report: dict[str, Any]) -> None:
    """`Output.object`: JSON that follows a schema."""
    assert isinstance(part(report, "chat_object")["brave"], bool)


def test_a_second_turn(report: dict[str, Any], server: ServerProcess) -> None:
    """A second turn by responses: the first answer named by its id (`item_reference`), and `previousResponseId`."""
    said = part(report, "second_turn")
    assert said["first"] == chatted(server)["text"]
    assert said["second"]
    assert said["third"] == said["second"]
