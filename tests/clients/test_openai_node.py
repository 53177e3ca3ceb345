"""The `openai` library for JavaScript, in Node."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.support import OPENAI_NODE, assert_same, chatted, completed, part
from tests.server.support import ServerProcess

TOOL = OPENAI_NODE
SCRIPT = "openai_node.mjs"
pytestmark = pytest.mark.clients


@pytest.fixture(params=["/openai/v1", "/v1"])
def prefix(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_completions(report: dict[str, Any], server: ServerProcess) -> None:
    """Completions, whole and streamed with usage, under both prefixes."""
    assert_same(part(report, "completion"), completed(server))
    assert_same(part(report, "completion_stream"), completed(server))


def test_chat(report: dict[str, Any], server: ServerProcess) -> None:
    """Chat, whole, streamed with usage, and through `chat.completions.stream`, under both prefixes."""
    for name in ("chat", "chat_stream", "stream_helper"):
        assert_same(part(report, name), chatted(server))


def test_models(report: dict[str, Any], server: ServerProcess) -> None:
    """The list of models, under both prefixes."""
    assert part(report, "models") == [server.model]


def test_refusals(report: dict[str, Any], server: ServerProcess, prefix: str) -> None:
    """Refusals as the library's exceptions, and the next request, under both prefixes."""
    said = part(report, "refusals")
    strict = prefix == "/openai/v1"
    value, model = "BadRequestError" if strict else "UnprocessableEntityError", "NotFoundError"
    assert said["key"]["types"] == ["AuthenticationError"]
    assert said["value"]["types"] == [value]
    assert "top_p" in said["value"]["message"]
    assert said["model"]["types"] == [model]
    assert_same(said["next"], completed(server))
