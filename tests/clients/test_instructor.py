"""`instructor`, at the strict prefix."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.support import INSTRUCTOR, part

TOOL = INSTRUCTOR
SCRIPT = "instructor_models.py"
pytestmark = [
    pytest.mark.clients,
    pytest.mark.parametrize("phase", [5, 8, 9, 10], indirect=True, scope="session"),
]


def is_fox(said: dict[str, Any]) -> bool:
    return said["colour"] in ("red", "white") and isinstance(said["brave"], bool)


def test_models_by_tools(report: dict[str, Any]) -> None:
    """`response_model` by tool calls (`TOOLS`, `TOOLS_STRICT`), and streamed (`create_partial`)."""
    assert all(map(is_fox, part(report, "tools")))
    streamed = part(report, "partial")
    assert streamed["last"] == part(report, "tools")[0]
    assert streamed["first"] != streamed["last"]
    assert streamed["pieces"] > 2


def test_models_by_schemas(report: dict[str, Any]) -> None:
    """`response_model` by `response_format` (`JSON_SCHEMA`)."""
    assert is_fox(part(report, "schema"))


def test_refusals(report: dict[str, Any]) -> None:
    """A refusal as an exception, and the next request."""
    said = part(report, "refusals")
    assert "top_p" in said["value"]["message"]
    assert is_fox(said["next"])
