"""The `openai` library for Python."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.support import MAX_TOKENS, OPENAI, PROMPT, assert_same, chatted, completed, part
from tests.server.support import MESSAGES, ServerProcess, rendered

TOOL = OPENAI
SCRIPT = "openai_python.py"
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
    for name in ("chat", "chat_stream"):
        assert_same(part(report, name), chatted(server))
    assert_same(part(report, "stream_helper"), chatted(server, max_tokens=200, stop="."))


def test_logprobs(report: dict[str, Any], server: ServerProcess) -> None:
    """`logprobs` of completions and of chat, under both prefixes."""
    native = server.complete(max_tokens=MAX_TOKENS, logprobs=2)["choices"][0]["logprobs"]
    assert part(report, "completion_logprobs") == native
    talk = server.complete(prompt=rendered(MESSAGES), max_tokens=MAX_TOKENS, logprobs=2)["choices"][0]
    said = part(report, "chat_logprobs")
    assert [entry["token"] for entry in said] == talk["logprobs"]["tokens"]
    assert [entry["logprob"] for entry in said] == talk["logprobs"]["token_logprobs"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in said)


def test_choices(report: dict[str, Any], server: ServerProcess) -> None:
    """`n` of 3 with a seed, completions and chat, under both prefixes."""
    said = part(report, "choices")
    for name, prompt in (("completions", PROMPT), ("chat", rendered(MESSAGES))):
        native = server.complete(prompt=prompt, max_tokens=MAX_TOKENS, temperature=1, seed=3, n=3)
        assert said[name] == [choice["text"] for choice in native["choices"]]
        assert len(set(said[name])) == 3
        assert native["usage"]["completion_tokens"] in said["generated"]


def test_structured_outputs(report: dict[str, Any], server: ServerProcess) -> None:
    """`parse` with a pydantic class, `response_format`, `structured_outputs`, under both prefixes."""
    said = part(report, "structured")
    assert set(said["parsed"]) == {"brave"}
    assert json.loads(said["schema"]) == said["parsed"]
    assert said["choice"] in ("red", "green")
    assert said["regex"].isdecimal()
    assert len(said["regex"]) == 4
    one_of = {"choice": ["red", "green"]}
    assert said["choice"] == completed(server, structured_outputs=one_of)["text"]


def test_models(report: dict[str, Any], server: ServerProcess) -> None:
    """The list of models, and one of them, under both prefixes."""
    assert part(report, "models") == {"listed": [server.model], "one": server.model}


def test_refusals(report: dict[str, Any], server: ServerProcess, prefix: str) -> None:
    """Refusals as the library's exceptions, a stream left early, and the next request, under both prefixes."""
    said = part(report, "refusals")
    strict = prefix == "/openai/v1"
    value, model = "BadRequestError" if strict else "UnprocessableEntityError", "NotFoundError"
    for name, kind, field in (
        ("key", "AuthenticationError", "key"),
        ("value", value, "top_p"),
        ("model", model, "another"),
        ("prompt", "BadRequestError", "prompt"),
        ("in a stream", value, "top_p"),
    ):
        assert said[name]["types"][0] == kind, said[name]
        assert field in said[name]["message"]
    assert_same(said["next"], completed(server))
    assert_same(part(report, "left_early"), completed(server))


def test_asynchronous(report: dict[str, Any], server: ServerProcess, prefix: str) -> None:
    """`AsyncOpenAI`, ten requests side by side, one of them refused, under both prefixes."""
    said = part(report, "asynchronous")
    assert said["chat"] == [chatted(server)["text"]] * 6
    assert said["text"] == [completed(server)["text"]] * 3
    assert said["refused"]["status"] == (400 if prefix == "/openai/v1" else 422)
