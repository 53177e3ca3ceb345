"""Chat: the rendered conversation, the chunks of its streams, and other templates."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from common.models.registry import ZOO, open_checkpoint
from tests.support.servers import (
    MESSAGES,
    ServerProcess,
    answer_of,
    app_with,
    assert_error,
    rendered,
)


def post(server: ServerProcess, prefix: str = "/v1", **fields: Any) -> httpx.Response:
    return server.ask(f"{prefix}/chat/completions", **fields)


def chat(server: ServerProcess, prefix: str = "/v1", **fields: Any) -> dict[str, Any]:
    return answer_of(post(server, prefix, **fields))


# ---------------------------------------------------------------------- answers


def test_an_answer_continues_the_rendered_conversation(server: ServerProcess, prefix: str) -> None:
    answer = chat(server, prefix, max_tokens=20)
    assert set(answer) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    assert (answer["object"], answer["model"]) == ("chat.completion", server.model)
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    text = server.complete(prompt=rendered(MESSAGES), max_tokens=20)
    assert choice["message"] == {"role": "assistant", "content": text["choices"][0]["text"], "refusal": None}
    assert (choice["logprobs"], choice["finish_reason"]) == (None, text["choices"][0]["finish_reason"])
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][name] == text["usage"][name]


def test_an_answer_without_max_tokens_fills_the_context(server: ServerProcess) -> None:
    long = [{"role": "user", "content": "A fox, and more. " * 120}]
    usage = chat(server, messages=long, max_tokens=None, ignore_eos=True)["usage"]
    assert usage["total_tokens"] == 1024, "the server's --max-seq-len"
    for fields in ({"max_completion_tokens": 5}, {"max_completion_tokens": 5, "max_tokens": 5}):
        fields = {"max_tokens": None, "ignore_eos": True} | fields
        assert chat(server, **fields)["usage"]["completion_tokens"] == 5


def test_a_message_can_be_continued(server: ServerProcess) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "Once upon a"}]
    answer = chat(server, messages=begun, continue_final_message=True)
    prompt = rendered(begun, add_generation_prompt=False, continue_final_message=True)
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    text = server.complete(prompt=prompt)["choices"][0]["text"]
    assert answer["choices"][0]["message"]["content"] == text
    assert chat(server, messages=begun)["choices"] == answer["choices"]
    answered = chat(server, messages=begun, add_generation_prompt=True)
    assert answered["usage"]["prompt_tokens"] == len(rendered(begun, add_generation_prompt=True))
    closed = chat(server, messages=begun, add_generation_prompt=False)
    assert closed["usage"]["prompt_tokens"] == len(rendered(begun, add_generation_prompt=False))


def test_roles_parts_and_names(server: ServerProcess) -> None:
    """Parts are joined with nothing between. A developer's message is a system message for this template."""
    parts = [{"type": "text", "text": "Tell me"}, {"type": "text", "text": " a story."}]
    whole = chat(server, messages=[{"role": "developer", "content": "x"}, {"role": "user", "content": parts}])
    plain = [{"role": "system", "content": "x"}, {"role": "user", "content": "Tell me a story."}]
    assert whole["usage"]["prompt_tokens"] == len(rendered(plain))
    assert whole["choices"] == chat(server, messages=plain)["choices"]
    named = [{"role": "user", "content": "Hello", "name": "Zoë"}]
    assert chat(server, messages=named)["choices"]


# ---------------------------------------------------------------------- streams


def test_a_stream_says_the_role_first_and_ends_with_the_last_text(server: ServerProcess, prefix: str) -> None:
    first, *said = server.chunks(f"{prefix}/chat/completions", max_tokens=6, ignore_eos=True)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [set(chunk["choices"][0]["delta"]) for chunk in said] == [{"content"}] * 6
    assert [chunk["choices"][0]["finish_reason"] for chunk in (first, *said)] == [None] * 6 + ["length"]
    assert said[-1]["choices"][0]["delta"]["content"]
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in said)
    whole = chat(server, prefix, max_tokens=6, ignore_eos=True)
    assert text == whole["choices"][0]["message"]["content"]
    assert {chunk["object"] for chunk in said} == {"chat.completion.chunk"}
    assert not any("usage" in chunk for chunk in said)


def test_every_choice_has_its_role_and_all_have_one_usage(server: ServerProcess) -> None:
    fields = {"n": 3, "seed": 1, "temperature": 1}
    usage = {"stream_options": {"include_usage": True}}
    *said, last = server.chunks("/v1/chat/completions", **fields, **usage, cache_salt="stream")
    assert (last["choices"], last["usage"]) == ([], chat(server, **fields, cache_salt="whole")["usage"])
    for index in range(3):
        deltas = [c["choices"][0]["delta"] for c in said if c["choices"][0]["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert not any("role" in delta for delta in deltas[1:])


# ---------------------------------------------------------------------- messages without text


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_no_content_is_an_empty_text(server: ServerProcess, role: str) -> None:
    question = {"role": "user", "content": "And then?"}
    conversations = [
        [{"role": role} | content, question]
        for content in ({"content": ""}, {"content": None}, {}, {"content": []})
    ]
    first, *others = [chat(server, messages=messages) for messages in conversations]
    assert first["usage"]["prompt_tokens"] == len(rendered(conversations[0]))
    for other in others:
        assert (other["choices"], other["usage"]["prompt_tokens"]) == (
            first["choices"],
            first["usage"]["prompt_tokens"],
        )


# ---------------------------------------------------------------------- other templates


def app_of(folder: Path, template: str | None) -> TestClient:
    """Return a client of an app whose model has this chat template."""
    copy = Path(shutil.copytree(ZOO / "llama-tiny", folder / "model"))
    (copy / "chat_template.jinja").unlink()
    if template is not None:
        (copy / "chat_template.jinja").write_text(template)
    return app_with(model=str(copy))


def test_a_model_without_a_template_refuses_conversations(tmp_path: Path) -> None:
    with app_of(tmp_path, None) as client:
        for prefix, status in (("/v1", 422), ("/openai/v1", 400)):
            refused = client.post(f"{prefix}/chat/completions", json={"messages": MESSAGES})
            assert_error(refused, status, "messages", says="no chat template")
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_template_reads_variables_and_may_refuse(tmp_path: Path) -> None:
    """A template gets `chat_template_kwargs`. If it raises, the request is refused and the next one served."""
    template = (
        "{% if loud %}{{ messages[0].content | upper }}{% else %}{{ messages[0].content }}{% endif %}"
        "{% if messages | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}{{ 'x' * times }}"
    )
    hello = [{"role": "user", "content": "hello"}]
    with app_of(tmp_path, template) as client:

        def ask(path: str = "/v1/chat/completions", messages: Any = hello, **variables: Any) -> Any:
            sent = {"messages": messages, "chat_template_kwargs": variables}
            return client.post(path, json=sent | ({"max_tokens": 4} if "chat" in path else {}))

        told: list[tuple[dict[str, Any], str]] = [
            ({"times": 1}, "hellox"),
            ({"times": 2, "loud": True}, "HELLOxx"),
        ]
        for variables, text in told:
            token_ids = open_checkpoint("zoo:llama-tiny").tokenizer().encode(text, add_special_tokens=False)
            assert answer_of(ask(**variables))["usage"]["prompt_tokens"] == len(token_ids)
        assert_error(ask(messages=hello * 2, times=1), 422, "messages", says="one at a time")
        assert_error(ask("/tokenize", hello * 2, times=1), 422, "messages", says="one at a time")
        assert_error(ask(times="x"), 422, "messages", says="TypeError")
        assert_error(ask(messages=[{"role": "user", "content": ""}], times=0), 400, "messages")
        assert ask(times=1).status_code == 200
