"""`LLM.chat`: conversations offline, as the server answers them."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import InvalidRequestError
from common.llm import LLM
from common.request import SamplingParams
from tests.support.engines import build, llm_of
from tests.support.servers import MESSAGES, rendered

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24)
OTHER = [{"role": "user", "content": "What does a fox like to eat?"}]


@pytest.fixture(scope="module", params=["static", "speculative"])
def llm(request: pytest.FixtureRequest) -> LLM:
    return LLM("zoo:llama-tiny", phase=request.param, dtype="float32", max_seq_len=512, seed=3)


def test_a_conversation_is_answered_as_its_rendered_prompt(llm: LLM) -> None:
    (answer,) = llm.chat(MESSAGES, GREEDY, progress=False)
    (expected,) = llm.generate(rendered(MESSAGES), GREEDY, progress=False)
    assert (answer.text, answer.token_ids) == (expected.text, expected.token_ids)
    assert answer.prompt_tokens == len(rendered(MESSAGES))
    assert isinstance(answer.prompt, str)
    assert answer.prompt.startswith("<|begin_of_text|>")
    assert answer.prompt.count("<|begin_of_text|>") == 1


def test_the_last_message_is_continued(llm: LLM) -> None:
    begun = [*OTHER, {"role": "assistant", "content": "A fox likes"}]
    (answer,) = llm.chat(begun, GREEDY, progress=False, continue_final_message=True)
    ids = rendered(begun, add_generation_prompt=False, continue_final_message=True)
    (expected,) = llm.generate(ids, GREEDY, progress=False)
    assert answer.text == expected.text
    assert str(answer.prompt).endswith("A fox likes")


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([[]], "a conversation needs a message"),
        ("hi", r"messages\[0\] must be a message, not str"),
        ([{"role": "user", "content": "\ud83d"}], "surrogates not allowed"),
        ([{"role": "user"}], r"messages\[0\]: its content must be a text"),
        ([*OTHER, {"content": "x"}], r"messages\[1\]: its role must be a text"),
        ([{"role": "user", "content": "fox " * 3000}], "prompt is too long"),
        ([OTHER, [{"role": "user", "content": None}]], r"messages\[0\]: its content must be a text"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_conversation_that_cannot_be_answered_stops_all(llm: LLM, messages: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        llm.chat(messages, GREEDY, progress=False)
    assert not llm.engine.has_work


def test_a_model_without_a_template_reads_no_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(build("continuous"), monkeypatch)
    with pytest.raises(
        InvalidRequestError, match=r"no chat template.*generate\(\) continues text"
    ) as refused:
        llm.chat(OTHER)
    assert refused.value.param == "messages"
