"""What is asked of every client's answers: that they are the server's own."""

from __future__ import annotations

from typing import Any

from tests.clients.conftest import MAX_TOKENS, MESSAGES, rendered
from tests.server.support import ServerProcess

USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")


def completed(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    """What the native route answers: the text, and its usage."""
    answer = server.complete(**({"max_tokens": MAX_TOKENS} | fields))
    return {"text": answer["choices"][0]["text"], "usage": [answer["usage"][name] for name in USAGE]}


def chatted(server: ServerProcess, messages: Any = MESSAGES, **fields: Any) -> dict[str, Any]:
    """What the native route answers to the rendered conversation."""
    return completed(server, prompt=rendered(messages), **fields)


def part(report: dict[str, Any], name: str) -> Any:
    """What a script's part returned; what it raised fails the test."""
    said = report[name]
    assert "raised" not in said, said["raised"]
    return said["returned"]


def assert_same(said: dict[str, Any], expected: dict[str, Any]) -> None:
    """A client's text, usage and pieces, as far as it reports them, are the server's."""
    assert said["text"] == expected["text"]
    if "usage" in said:
        assert said["usage"] == expected["usage"]
        prompt, generated, total = said["usage"]
        assert prompt + generated == total
    if "pieces" in said:
        assert "".join(said["pieces"]) == expected["text"]
        assert len(said["pieces"]) > 3, "it came at once"
