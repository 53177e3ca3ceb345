"""Fields that restrict tokens, show more of the text or of the prompt, or set a priority, on every route."""

from __future__ import annotations

from typing import Any

import pytest

from common.models.registry import open_checkpoint
from tests.support.servers import MESSAGES, ServerProcess, app_with, assert_error, rendered

ROUTES = ("/v1/completions", "/openai/v1/completions", "/v1/chat/completions")
TOKENIZER = open_checkpoint("zoo:llama-tiny").tokenizer()


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def choice_of(server: ServerProcess, route: str, **fields: Any) -> dict[str, Any]:
    """Return the only choice of a JSON answer."""
    response = server.ask(route, **({"stream": False, "max_tokens": 30} | fields))
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return dict(choice)


def text_in(choice: dict[str, Any]) -> str:
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def streamed(server: ServerProcess, route: str, **fields: Any) -> str:
    """Return the text of a stream's only choice."""
    fields = {"max_tokens": 30} | fields
    if route == "/v1/completions":
        return "".join(data["token"] for name, data in server.events(**fields) if name == "token")
    choices = [chunk["choices"][0] for chunk in server.chunks(route, **fields)]
    return "".join(each["delta"]["content"] if "delta" in each else each["text"] for each in choices)


# ---------------------------------------------------------------------- tokens that may come


def test_bad_words_do_not_come(server: ServerProcess, route: str) -> None:
    free = text_in(choice_of(server, route))
    word = next(word for word in free.split() if word.isalpha() and len(word) > 3)
    again = {"bad_words": [word], "return_token_ids": True}
    choice = choice_of(server, route, **again)
    assert word in free
    ids = choice["token_ids"]
    for spelled in (word, " " + word):
        bad = TOKENIZER.encode(spelled, add_special_tokens=False)
        assert not any(ids[i : i + len(bad)] == bad for i in range(len(ids)))
    assert text_in(choice) != free
    assert streamed(server, route, bad_words=[word]) == text_in(choice)


def test_only_allowed_tokens_come(server: ServerProcess, route: str) -> None:
    allowed = [*range(200, 260)]
    choice = choice_of(server, route, allowed_token_ids=allowed, return_token_ids=True)
    assert len(choice["token_ids"]) == 30, "no EOS is allowed"
    assert set(choice["token_ids"]) <= set(allowed)
    assert choice["finish_reason"] == "length"
    assert streamed(server, route, allowed_token_ids=allowed) == text_in(choice)


def test_an_answer_without_a_token_left_is_the_requests_fault(server: ServerProcess, route: str) -> None:
    fields: dict[str, Any] = {"structured_outputs": {"choice": ["ab"]}, "bad_words": ["b", "ab"]}
    response = server.ask(route, stream=False, **fields)
    assert_error(response, 400 if route.startswith("/openai") else 422, code="no_token_left")


# ---------------------------------------------------------------------- what the text shows


def test_a_stop_string_is_shown_on_request(server: ServerProcess, route: str) -> None:
    free = text_in(choice_of(server, route))
    stop = free.split()[3]
    before, _, _ = free.partition(stop)
    assert text_in(choice_of(server, route, stop=stop)) == before
    shown = {"stop": stop, "include_stop_str_in_output": True}
    choice = choice_of(server, route, **shown)
    assert (text_in(choice), choice["finish_reason"]) == (before + stop, "stop")
    assert streamed(server, route, **shown) == before + stop


def test_special_tokens_are_shown_on_request(server: ServerProcess, route: str) -> None:
    """The end-of-turn token is shown only if special tokens and stop strings are both shown, as in vLLM."""
    question = [{"role": "user", "content": "What does a fox like to eat?"}]
    prompted = route.endswith("v1/completions")
    fields = {"prompt": rendered(question)} if prompted else {"messages": question}
    fields |= {"max_tokens": 60}
    hidden = text_in(choice_of(server, route, **fields))
    with_stop = fields | {"include_stop_str_in_output": True}
    assert text_in(choice_of(server, route, **with_stop)) == hidden
    assert text_in(choice_of(server, route, **fields, skip_special_tokens=False)) == hidden
    shown = with_stop | {"skip_special_tokens": False}
    assert text_in(choice_of(server, route, **shown)) == hidden + "<|eot_id|>"
    assert streamed(server, route, **shown) == hidden + "<|eot_id|>"
    stops = fields | {"stop": "<|eot_id|>", "ignore_eos": True, "skip_special_tokens": False}
    assert text_in(choice_of(server, route, **stops)) == hidden


def test_an_echo_of_tokens_shows_special_ones_on_request(server: ServerProcess) -> None:
    for hidden in (True, False):
        text = server.text(prompt=rendered(MESSAGES), echo=True, skip_special_tokens=hidden, max_tokens=1)
        assert text.startswith("<|begin_of_text|>") is not hidden


# ---------------------------------------------------------------------- what chat shows of the prompt


@pytest.mark.parametrize("n", [1, 2])
def test_a_chat_shows_token_ids_and_scores_of_its_prompt_as_vllm_does(server: ServerProcess, n: int) -> None:
    route = "/v1/chat/completions"
    fields = {"return_token_ids": True, "prompt_logprobs": 2, "max_tokens": 6, "n": n, "ignore_eos": True}
    answer = server.ask(route, **fields).json()
    ids = rendered(MESSAGES)
    scored = server.complete(prompt=ids, prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    assert answer["prompt_token_ids"] == ids
    assert answer["prompt_logprobs"] == scored
    for choice in answer["choices"]:
        assert TOKENIZER.decode(choice["token_ids"]).strip() == choice["message"]["content"].strip()
        assert len(choice["token_ids"]) == 6
    chunks = server.chunks(route, **fields)
    assert [{"prompt_token_ids", "prompt_logprobs"} <= set(chunk) for chunk in chunks] == [
        True,
        *[False] * (len(chunks) - 1),
    ]
    assert (chunks[0]["prompt_token_ids"], chunks[0]["prompt_logprobs"]) == (ids, scored)
    for choice in answer["choices"]:
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert [token for each in own for token in each.get("token_ids", ())] == choice["token_ids"]
    assert not {"prompt_token_ids", "prompt_logprobs"} & set(server.ask(route).json())


def test_a_chat_echoes_the_assistants_last_message(server: ServerProcess) -> None:
    route = "/v1/chat/completions"
    begun = [*MESSAGES, {"role": "assistant", "content": "Once upon a"}]
    fields = {"messages": begun, "continue_final_message": True}
    plain = text_in(choice_of(server, route, **fields))
    assert text_in(choice_of(server, route, **fields, echo=True)) == "Once upon a" + plain
    assert streamed(server, route, **fields, echo=True) == "Once upon a" + plain
    assert text_in(choice_of(server, route, echo=True)) == text_in(choice_of(server, route))


# ---------------------------------------------------------------------- order, and the fingerprint


def test_a_priority_changes_no_answer(server: ServerProcess, route: str) -> None:
    assert choice_of(server, route, priority=-3) == choice_of(server, route)


def test_static_batches_have_no_priorities() -> None:
    with app_with("phase4_static") as client:
        assert_error(client.post("/v1/completions", json={"prompt": "Once", "priority": -3}), 422, "priority")


def test_every_object_of_every_answer_has_the_fingerprint(server: ServerProcess) -> None:
    found = {server.ask(route, stream=False).json()["system_fingerprint"] for route in ROUTES}
    found |= {chunk["system_fingerprint"] for route in ROUTES[1:] for chunk in server.chunks(route)}
    found |= {data["system_fingerprint"] for _, data in server.events()}
    assert len(found) == 1
