"""`litellm`, at the strict prefix."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.support import LITELLM, assert_same, chatted, completed, part
from tests.server.support import ServerProcess

TOOL = LITELLM
SCRIPT = "litellm_calls.py"
pytestmark = pytest.mark.clients


def test_chat(report: dict[str, Any], server: ServerProcess) -> None:
    """`completion` and `acompletion`, whole and streamed, with usage."""
    for said in (part(report, "chat"), part(report, "chat_stream"), *part(report, "asynchronous")):
        assert_same(said, chatted(server))


def test_text(report: dict[str, Any], server: ServerProcess) -> None:
    """`text_completion`, whole and streamed."""
    assert_same(part(report, "text"), completed(server))
    assert_same(part(report, "text_stream"), completed(server))


def test_tools(report: dict[str, Any]) -> None:
    """`completion` with a tool, required and named, whole and streamed, and with its result."""
    said = part(report, "tools")
    assert said["reasons"] == ["tool_calls"] * 2
    for name, arguments in said["calls"]:
        assert (name, set(json.loads(arguments))) == ("find_fox", {"brave"})
    assert len(said["calls"]) == 2
    assert said["text"]


def test_refusals(report: dict[str, Any], server: ServerProcess) -> None:
    """Refusals (a key, a value, a model, a stream's) as exceptions, and the next request."""
    said = part(report, "refusals")
    assert "AuthenticationError" in said["key"]["types"]
    assert "BadRequestError" in said["value"]["types"]
    assert "top_p" in said["value"]["message"]
    assert "NotFoundError" in said["model"]["types"]
    assert "BadRequestError" in said["in a stream"]["types"]
    assert_same(said["next"], chatted(server))
