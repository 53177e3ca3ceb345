"""`guidellm`, whose default is chat."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.support import GUIDELLM, MAX_TOKENS, ON_TWO_PHASES, completed, part
from tests.server.support import ServerProcess, rendered

TOOL = GUIDELLM
SCRIPT = "guidellm_run.py"
pytestmark = [pytest.mark.clients, ON_TWO_PHASES]


def assert_measured(said: dict[str, Any], server: ServerProcess) -> None:
    """Assert that the tool got, for every request, the text and usage that the native route gives."""
    assert len(said["successful"]) == said["sent"], said["errors"]
    for each in said["successful"]:
        body = each["body"]
        prompt = rendered(flattened(body["messages"])) if "messages" in body else body["prompt"]
        expected = completed(server, prompt=prompt, ignore_eos=True)
        assert each["text"] == expected["text"]
        assert each["tokens"] == expected["usage"][:2]
        assert each["tokens"][1] == MAX_TOKENS
        assert each["pieces"] > 3, "it came at once"  # a token's text may be held back, or empty


def flattened(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        message | {"content": "\n".join(piece["text"] for piece in message["content"])}
        for message in messages
    ]


def test_chat(report: dict[str, Any], server: ServerProcess) -> None:
    """Its default, chat with synthetic prompts: every text, and the tokens it counted."""
    assert_measured(part(report, "chat"), server)


def test_completions(report: dict[str, Any], server: ServerProcess) -> None:
    """`/v1/completions` below `/openai`: every text, and the tokens it counted."""
    assert_measured(part(report, "completions"), server)


def test_refusals(report: dict[str, Any], server: ServerProcess) -> None:
    """Refused requests are counted as errors; and the next request."""
    said = part(report, "refused")
    assert said["successful"] == []
    assert len(said["errors"]) >= 1
    assert completed(server)["text"]
