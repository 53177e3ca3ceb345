"""A failed forward pass, as each kind of answer tells it, and a client that leaves each kind of answer.

What a failed pass means for other requests is tested at the engine (`tests/test_failures.py`).
"""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.support.gate import SECRET
from tests.support.servers import MESSAGES, ServerProcess, assert_error, eventually, read_events

DELTA = "response.output_text.delta"
#: A request of Anthropic's API.
ASK = {"messages": MESSAGES[1:], "max_tokens": 900, "ignore_eos": True}


@pytest.mark.parametrize("path", ["/v1/completions", "/openai/v1/completions", "/v1/chat/completions"])
def test_an_error_in_a_stream_names_its_choice(gated: ServerProcess, path: str) -> None:
    """If there are several choices, an error chunk names its choice. The cause is in the log, not in the answer."""
    gated.order("fail")
    for n in (1, 3):
        text = gated.ask(path, n=n, stream=True, max_tokens=4).text
        assert SECRET not in text
        lines = text.splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
        errors = [chunk for chunk in map(json.loads, data) if "error" in chunk]
        assert [chunk["error"]["code"] for chunk in errors] == ["internal_error"] * n
        assert all(set(chunk["error"]) == {"message", "type", "param", "code"} for chunk in errors)
        assert n > 1 or set(errors[0]) == {"error"}
        named = sorted(choice["index"] for chunk in errors for choice in chunk.get("choices", []))
        assert named == ([] if n == 1 else [0, 1, 2])
    whole = gated.ask(path, stream=False)
    assert_error(whole, 500, None, "internal_error")
    assert SECRET not in whole.text
    assert SECRET in gated.log_text


@pytest.mark.parametrize("order", ["fail", "nan"])
def test_openais_library_does_not_send_a_failed_request_again(gated: ServerProcess, order: str) -> None:
    """The library sends a request up to three times, unless the answer has `x-should-retry: false`."""
    gated.order(order)
    with (
        openai.OpenAI(base_url=f"{gated.url}/v1", api_key="none") as client,
        pytest.raises(openai.InternalServerError) as failed,
    ):
        client.completions.create(model=gated.model, prompt="A failure of", max_tokens=2)
    assert failed.value.response.headers["x-should-retry"] == "false"
    assert gated.counters()["requests_added"] == 1


@pytest.mark.parametrize("begun", [False, True])
def test_a_failed_response_keeps_its_text_and_is_not_stored(gated: ServerProcess, begun: bool) -> None:
    """The pass fails before the first token, or behind it."""
    body = gated.response_body(stream=True, max_output_tokens=None, ignore_eos=True)
    if not begun:
        gated.order("fail")
    events: list[Any] = []
    with gated.client.stream("POST", "/v1/responses", json=body) as response:
        for name, event in read_events(response):
            if name == DELTA and not any(each["type"] == DELTA for each in events):
                gated.order("fail")
            events.append(event)
    error, response_failed = events[-2:]
    assert (error["type"], error["code"], error["error"]["code"]) == (
        "error",
        "internal_error",
        "internal_error",
    )
    assert response_failed["type"] == "response.failed"
    failed = response_failed["response"]
    assert failed["error"] == {"code": "server_error", "message": error["message"]}
    text = "".join(event["delta"] for event in events if event["type"] == DELTA)
    said = [(item["status"], item["content"][0]["text"]) for item in failed["output"]]
    assert said == ([("incomplete", text)] if begun else [])
    assert_error(gated.ask("/v1/responses"), 500, None, "internal_error")
    gated.order("heal")
    assert gated.client.get(f"/v1/responses/{failed['id']}").status_code == 404


@pytest.mark.slow
def test_anthropics_library_raises_a_failure(gated: ServerProcess) -> None:
    import anthropic  # takes two seconds

    gated.order("fail")
    events = list(read_events(gated.client.post("/v1/messages", json=ASK | {"stream": True})))
    assert [name for name, _ in events] == ["message_start", "ping", "error"]
    assert events[-1][1]["error"]["type"] == "api_error"
    asked: Any = {"model": gated.model, "messages": MESSAGES[1:], "max_tokens": 20}
    with anthropic.Anthropic(base_url=gated.url, api_key="any", max_retries=0) as client:
        with pytest.raises(anthropic.APIStatusError), client.messages.stream(**asked) as stream:
            stream.get_final_message()
        with pytest.raises(anthropic.InternalServerError):
            client.messages.create(**asked)


# ---------------------------------------------------------------------- clients that leave

LONG = {"max_tokens": 900, "ignore_eos": True}
#: Route and body of each kind of answer.
ANSWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "native stream": ("/v1/completions", {"prompt": "Once", "stream": True} | LONG),
    "JSON": ("/v1/completions", {"prompt": "Once", "stream": False} | LONG),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "stream": True} | LONG),
    "responses": ("/v1/responses", {"input": MESSAGES, "stream": True, "ignore_eos": True}),
    "messages": ("/v1/messages", ASK | {"stream": True}),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_client_that_leaves_ends_its_request(gated: ServerProcess, kind: str) -> None:
    path, body = ANSWERS[kind]
    if kind == "JSON":
        with gated.raw(**body):
            eventually(lambda: gated.counters()["decode_tokens"] > 0)
    else:
        with gated.client.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            eventually(lambda: gated.counters()["decode_tokens"] > 0)
    eventually(lambda: gated.counters()["requests_cancelled"] == 1)
    assert gated.counters()["requests_finished"] == 0
