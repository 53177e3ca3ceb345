"""`langchain-openai`, at the strict prefix."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.support import LANGCHAIN, assert_same, chatted, completed, part
from tests.server.support import ServerProcess

TOOL = LANGCHAIN
SCRIPT = "langchain_models.py"
pytestmark = pytest.mark.clients


def test_chat(report: dict[str, Any], server: ServerProcess) -> None:
    """`ChatOpenAI`: `invoke`, `stream`, `ainvoke`, `astream`, `batch`, with usage."""
    expected = chatted(server)
    for said in (part(report, "chat"), part(report, "chat_stream")):
        assert_same(said, expected)
    for said in (*part(report, "asynchronous"), *part(report, "batch")):
        assert_same(said, expected)


def test_text(report: dict[str, Any], server: ServerProcess) -> None:
    """`OpenAI` (completions): `invoke`, `stream`."""
    assert_same(part(report, "text"), completed(server))
    assert_same(part(report, "text_stream"), completed(server))


def test_structured_output(report: dict[str, Any]) -> None:
    """`with_structured_output` of a pydantic class by `json_schema`."""
    assert set(part(report, "structured")) == {"brave"}


def test_tools(report: dict[str, Any]) -> None:
    """`bind_tools`, whole and streamed, and `with_structured_output` by `function_calling`."""
    called = part(report, "tools")
    assert [set(arguments) for arguments in called] == [{"brave"}] * 3
    assert called[0] == called[1] == called[2]


def test_refusals(report: dict[str, Any], server: ServerProcess) -> None:
    """Refusals (a key, a value, a model) as exceptions, and the next request."""
    said = part(report, "refusals")
    assert "AuthenticationError" in said["key"]["types"]
    assert "BadRequestError" in said["value"]["types"]
    assert "NotFoundError" in said["model"]["types"]
    assert_same(said["next"], chatted(server))
