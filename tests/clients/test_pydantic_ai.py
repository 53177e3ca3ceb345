"""`pydantic-ai`: agents with typed answers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.support import PYDANTIC_AI, part

TOOL = PYDANTIC_AI
SCRIPT = "pydantic_ai_agent.py"
pytestmark = [
    pytest.mark.clients,
    pytest.mark.parametrize("phase", [5, 8, 10], indirect=True, scope="session"),
]


def assert_fox(fox: dict[str, Any]) -> None:
    assert fox["place"] in ("forest", "river")
    assert isinstance(fox["brave"], bool)


@pytest.mark.parametrize("route", ["by_chat", "by_responses"])
def test_typed_answers(report: dict[str, Any], route: str) -> None:
    """A typed answer as a forced call, and a second turn with the history, by chat and by responses."""
    said = part(report, route)
    assert_fox(said["fox"])
    assert_fox(said["next"])


def test_native_output(report: dict[str, Any]) -> None:
    """A typed answer by `response_format`."""
    assert_fox(part(report, "native"))


def test_a_loop_with_a_tool(report: dict[str, Any]) -> None:
    """A tool beside the typed answer; the model may call either."""
    assert_fox(part(report, "loop")["fox"])
