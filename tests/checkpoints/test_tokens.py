"""Token ids, streamed text and chat templates of real vocabularies."""

from __future__ import annotations

import random
from typing import Any

import pytest

from common.text import IncrementalDetokenizer
from tests.checkpoints.conftest import RealModel

pytestmark = [pytest.mark.checkpoints, pytest.mark.timeout(1200)]

PIECES = [
    "The capital of France is Paris.", "Hello, world!", "don't we'll I'VE", "naïve façade Ångström",
    "e\u0301 o\u0308 n\u0303", "ﬁ ½ ² Ⅷ", "你好，世界。", "日本語のテキスト", "한국어 문장",
    "مرحبا بالعالم", "שלום עולם", "नमस्ते दुनिया", "Здравствуй, мир", "👩‍🚀🏽", "😀😃", "🇫🇷",
    "def f(x: int) -> str:\n    return f'{x:>10}'", "for (int i = 0; i < n; ++i) {\n\t\ta[i] += 1;\n}",
    "<div class=\"a\">&nbsp;</div>", "{\"a\": [1, 2.5e-3, null]}", "SELECT * FROM t WHERE x <> 'y';",
    "https://example.org/a?b=c&d=%20", "1234567890", "3.14159", "0x1F", "12,345.67 €", "  ", "    ",
    "\t", "\t\t\t", "\n", "\n\n\n", "\r\n", " \n \n", "\u00a0", "\u3000", "\u200b", "<|im_start|>",
    "<|im_end|>", "<|endoftext|>", "<|im_start", "|im_end|>", "<bos>", "<eos>", "<start_of_turn>",
    "<end_of_turn>", "<unused5>", "<0x0A>", "</s>", "<pad>", "<table>", "<h1>", "▁", "▁▁", "Ġ", "Ċ",
    "\ufffd", "\x00", "\x7f", "aaaaaaaaaaaaaaaaaaaaaaaaa", "----------", "A" * 70, "?!?!?!", "…", "—",
    "“quoted”", "a_b-c.d/e\\f", "CamelCaseIdentifier", "snake_case_identifier", "🙂" * 9,
]  # fmt: skip


def strings(count: int) -> list[str]:
    """Return `count` texts: each piece alone, then random joins of pieces, and some texts of random characters."""
    draw = random.Random(1)
    found = list(PIECES)
    while len(found) < count:
        if draw.random() < 0.1:
            blocks = draw.choices((0x20, 0x300, 0x4E00, 0x1F600, 0x600), k=20)
            found.append("".join(chr(block + draw.randrange(90)) for block in blocks))
        else:
            found.append(draw.choice(("", " ")).join(draw.choices(PIECES, k=draw.randint(2, 9))))
    return found


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
    assert ends == ({"<|im_end|>"} if real.name == "smollm2" else {"<eos>"})
