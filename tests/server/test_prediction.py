"""`prediction`, and the counts of guessed tokens in usage and metrics (phase 10)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from common.hosting.local import LocalEngine
from common.server.app import create_app
from common.server.options import ServerOptions
from common.startup.phases import find_phase
from tests.support.servers import MESSAGES, answer_of

CHAT = {"messages": MESSAGES, "max_tokens": 40, "temperature": 0, "stream": False}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    package = find_phase(10)
    config = package.Config(device="cpu", dtype="float32", max_seq_len=256, draft_rows=16)
    with TestClient(
        create_app(LocalEngine(package.build_engine(config)), ServerOptions(served_model_name=["served"]))
    ) as client:
        yield client


def chat(client: TestClient, **fields: Any) -> dict[str, Any]:
    return answer_of(client.post("/v1/chat/completions", json=CHAT | fields))


def accepted(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"])


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


@pytest.mark.parametrize("parts", [False, True])
def test_a_right_prediction_is_accepted_and_a_wrong_one_changes_nothing(
    client: TestClient, parts: bool
) -> None:
    def prediction(text: str) -> dict[str, Any]:
        return {"type": "content", "content": [{"type": "text", "text": text}] if parts else text}

    plain = chat(client)
    right = chat(client, prediction=prediction(text_of(plain)))
    wrong = chat(client, prediction=prediction("Nothing of that kind, ever; " * 9))
    assert text_of(plain) == text_of(right) == text_of(wrong)
    assert accepted(right) >= right["usage"]["completion_tokens"] // 2
    assert accepted(right) > max(accepted(plain), accepted(wrong))
    assert wrong["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] > 0
    unlike = {"completion_tokens_details", "prompt_tokens_details"}
    for name in plain["usage"].keys() - unlike:
        assert plain["usage"][name] == right["usage"][name] == wrong["usage"][name]


def test_metrics_have_vllms_names(client: TestClient) -> None:
    answer = chat(client)
    chat(client, prediction={"type": "content", "content": text_of(answer)})
    values = {
        name: float(value)
        for name, value in re.findall(
            r"^vllm:spec_decode_(\w+?)_total\{.*\} (\S+)$", client.get("/metrics").text, re.M
        )
        if name != "num_accepted_tokens_per_pos"
    }
    assert set(values) == {"num_drafts", "num_draft_tokens", "num_accepted_tokens"}
    assert 0 < values["num_drafts"] < values["num_draft_tokens"]
    assert 0 < values["num_accepted_tokens"] <= values["num_draft_tokens"]
    places = re.findall(
        r'num_accepted_tokens_per_pos_total\{.*position="(\d+)".*\} (\S+)', client.get("/metrics").text
    )
    assert sum(float(count) for _, count in places) == values["num_accepted_tokens"]
    counts = [float(count) for _, count in sorted(places, key=lambda each: int(each[0]))]
    assert counts == sorted(counts, reverse=True), "a guess comes true only with all before it"
