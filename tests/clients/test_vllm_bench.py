"""vLLM's `bench serve`: the tool itself, without an engine of its own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.support import MAX_TOKENS, ON_TWO_PHASES, VLLM_BENCH, completed, part
from tests.server.support import ServerProcess, rendered

TOOL = VLLM_BENCH
SCRIPT = "vllm_bench.py"
pytestmark = [pytest.mark.clients, ON_TWO_PHASES]


def assert_measured(said: dict[str, Any], expected: list[dict[str, Any]]) -> None:
    assert (said["completed"], said["failed"]) == (len(expected), 0), said["errors"]
    assert said["texts"] == [each["text"] for each in expected]
    assert said["total_output_tokens"] == MAX_TOKENS * len(expected)
    assert all(gaps > 3 for gaps in said["gaps"]), "it came at once"


def test_completions(report: dict[str, Any], server: ServerProcess) -> None:
    """`--backend openai` on `/openai/v1/completions`: every text, and the tokens it counted."""
    said = part(report, "completions")
    expected = [completed(server, prompt=prompt, ignore_eos=True) for prompt in said["prompts"]]
    assert_measured(said, expected)


def test_chat(report: dict[str, Any], server: ServerProcess) -> None:
    """`--backend openai-chat` on `/openai/v1/chat/completions`: every text, and the tokens it counted."""
    said = part(report, "chat")
    talks = [rendered([{"role": "user", "content": prompt}]) for prompt in said["prompts"]]
    assert_measured(said, [completed(server, prompt=talk, ignore_eos=True) for talk in talks])


def test_refusals(report: dict[str, Any], server: ServerProcess) -> None:
    """Refused requests are counted as failed, with the reason; and the next request."""
    said = part(report, "refused")
    assert (said["completed"], said["failed"]) == (0, len(said["prompts"]))
    assert all(error for error in said["errors"])
    assert completed(server)["text"]
