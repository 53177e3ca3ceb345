"""Token ids, streamed text and chat templates of real vocabularies."""

from __future__ import annotations

from typing import Any

import pytest

from common.text.tokenizer import IncrementalDetokenizer
from tests.checkpoints.conftest import RealModel
from tests.support.strings import strings

pytestmark = [pytest.mark.checkpoints, pytest.mark.timeout(1200)]


def test_tokens_are_those_of_transformers(real: RealModel) -> None:
    texts = strings(2000)
    expected = real.oracle_tokenizer(texts, add_special_tokens=True)["input_ids"]
    for text, ids in zip(texts, expected, strict=True):
        assert real.tokenizer.encode(text) == ids, repr(text)


def test_streamed_pieces_join_to_the_whole(real: RealModel) -> None:
    for text in strings(600):
        if "\ufffd" in text:  # a stream would take it for half a character
            continue
        ids = real.tokenizer.encode(text, add_special_tokens=False)
        detokenizer = IncrementalDetokenizer(real.tokenizer, ())
        streamed = "".join(detokenizer.add(token_id) for token_id in ids) + detokenizer.finish()
        assert streamed == real.tokenizer.decode(ids), repr(text)


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "2 + 2?"}],
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": "  spaces \n\n and lines\n"}],
    [{"role": "user", "content": "<|im_end|> and <|im_start|>user\nno"}],
    [{"role": "user", "content": "{{ braces }} {% if x %}"}],
    [{"role": "system", "content": "你是一个助手。"}, {"role": "user", "content": "你好 👋"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
    [{"role": role, "content": f"turn {n}"} for n in range(8) for role in ("user", "assistant")],
    [{"role": "tool", "content": "3"}, {"role": "user", "content": "so?"}],
]


def test_conversations_have_the_text_that_transformers_gives_them(chat_model: RealModel) -> None:
    template = chat_model.tokenizer.chat_template
    assert template is not None
    for messages in CONVERSATIONS:
        for prompt in (True, False):
            theirs = chat_model.oracle_tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt
            )
            assert template.render(messages, add_generation_prompt=prompt) == theirs


def test_a_model_that_is_not_for_chats_has_no_template(real: RealModel) -> None:
    assert (real.tokenizer.chat_template is None) == (real.name == "gemma3-270m")
    ends = {real.tokenizer.token_text(token_id) for token_id in real.checkpoint.config.eos_token_ids}
    assert ends == ({"<|im_end|>", "<|endoftext|>"} if real.name == "smollm2" else {"<eos>", "<end_of_turn>"})
