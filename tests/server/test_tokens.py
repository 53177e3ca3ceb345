"""Text to token ids and back, by the routes of vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from common.models.registry import open_checkpoint
from tests.support.servers import ServerProcess, answer_of

TEXT = "Once upon a time, 猫 🐈‍⬛ met Zoë.\n  <|eot_id|> The end"
MESSAGES = [{"role": "user", "content": "Tell me a story."}]


@pytest.fixture(autouse=True)
def the_next_request_is_served(server: ServerProcess) -> Iterator[None]:
    yield
    assert tokenize(server, prompt="x")["count"] == 2


def tokenize(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    answer = answer_of(server.client.post("/tokenize", json=fields))
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 1024
    return answer


def test_tokenize_a_text(server: ServerProcess) -> None:
    tokenizer = open_checkpoint("zoo:llama-tiny").tokenizer()
    answer = tokenize(server, model=server.model, prompt=TEXT)
    assert answer["tokens"] == tokenizer.encode(TEXT)
    assert answer["token_strs"] is None
    plain = tokenize(server, prompt=TEXT, add_special_tokens=False, return_token_strs=True)
    assert plain["tokens"] == answer["tokens"][1:]
    assert plain["token_strs"] == [tokenizer.backend.id_to_token(i) for i in plain["tokens"]]
    assert tokenize(server, prompt="", add_special_tokens=False)["tokens"] == []


def test_tokenize_a_conversation(server: ServerProcess) -> None:
    answer = tokenize(server, messages=MESSAGES)
    body = {"model": server.model, "messages": MESSAGES, "max_tokens": 1}
    chat = server.client.post("/v1/chat/completions", json=body).json()
    assert chat["usage"]["prompt_tokens"] == answer["count"]
    shorter = tokenize(server, messages=MESSAGES, add_generation_prompt=False)
    assert answer["tokens"][: shorter["count"]] == shorter["tokens"]
    assert shorter["count"] < answer["count"]
    assert tokenize(server, messages=MESSAGES, add_special_tokens=True)["count"] == answer["count"] + 1
    begun = [*MESSAGES, {"role": "assistant", "content": "Once"}]
    continued = tokenize(server, messages=begun, continue_final_message=True)
    closed = tokenize(server, messages=begun, add_generation_prompt=False)
    assert continued["tokens"] == closed["tokens"][:-1]


def test_apply_template_and_input_tokens(server: ServerProcess) -> None:
    tokenizer = open_checkpoint("zoo:llama-tiny").tokenizer()
    prompt = answer_of(server.client.post("/apply-template", json={"messages": MESSAGES, "color": 1}))[
        "prompt"
    ]
    assert tokenizer.encode(prompt, add_special_tokens=False) == tokenize(server, messages=MESSAGES)["tokens"]
    body = {"instructions": "Be brief.", "input": "Tell me a story."}
    response = server.client.post("/v1/responses", json=body | {"max_output_tokens": 1}).json()
    with openai.OpenAI(base_url=f"{server.url}/openai/v1", api_key="none") as client:
        counted = client.responses.input_tokens.count(**body)
    assert (counted.object, counted.input_tokens) == (
        "response.input_tokens",
        response["usage"]["input_tokens"],
    )


def test_detokenize_inverts_tokenize(server: ServerProcess) -> None:
    tokens = tokenize(server, prompt=TEXT)["tokens"]
    answer = server.client.post("/detokenize", json={"model": server.model, "tokens": tokens}).json()
    assert answer == {"prompt": "<|begin_of_text|>" + TEXT}
    assert server.client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
