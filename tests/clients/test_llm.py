"""The command `llm`, at the strict prefix."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.support import LLM, assert_same, chatted, completed, part
from tests.server.support import MESSAGES, ServerProcess

TOOL = LLM
SCRIPT = "llm_command.py"
pytestmark = pytest.mark.clients


def test_commands(report: dict[str, Any], server: ServerProcess) -> None:
    """The command, chat and completions, streamed and with `--no-stream`."""
    for name in ("chat", "chat_at_once"):
        said = part(report, name)
        assert said["status"] == 0, said["log"]
        assert_same(said, chatted(server))
    prompt, generated, _ = chatted(server)["usage"]
    assert f"{prompt} input, {generated} output" in part(report, "chat_at_once")["log"]
    for name in ("text", "text_at_once"):
        assert_same(part(report, name), completed(server))


def test_a_conversation(report: dict[str, Any], server: ServerProcess) -> None:
    """`--continue`: the tool sends its own log of the conversation back."""
    said = part(report, "continued")
    assert_same(said["first"], chatted(server))
    talk = [
        *MESSAGES,
        {"role": "assistant", "content": said["first"]["text"]},
        {"role": "user", "content": "And then?"},
    ]
    assert_same(said["second"], chatted(server, talk))


def test_schema(report: dict[str, Any]) -> None:
    """`--schema`."""
    said = part(report, "schema")
    assert said["status"] == 0, said["log"]
    assert "brave" in json.loads(said["text"])


def test_library(report: dict[str, Any], server: ServerProcess) -> None:
    """`Model.prompt` of the library within, streamed, with usage."""
    assert_same(part(report, "library"), chatted(server))


def test_a_tool(report: dict[str, Any], server: ServerProcess) -> None:
    """`Model.chain` with a function, of which the model is told, and a function's result."""
    said = part(report, "tools")
    assert all(said["texts"])
    assert said["tokens"] > chatted(server)["usage"][0], "the model is told of the function"
    assert said["told"]


def test_refusals(report: dict[str, Any], server: ServerProcess) -> None:
    """Refusals as exceptions and as the command's errors, and the next request."""
    said = part(report, "refusals")
    assert "BadRequestError" in said["value"]["types"]
    assert said["key"]["status"] == said["model"]["status"] == 1
    assert "key" in said["key"]["log"]
    assert "another" in said["model"]["log"]
    assert_same(said["next"], chatted(server))
