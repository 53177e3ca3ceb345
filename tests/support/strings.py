"""Texts that tokenizers often get wrong: code, runs of spaces, look-alikes of special tokens, emoji, scripts."""

from __future__ import annotations

import random

PIECES = [
    "The capital of France is Paris.", "Hello, world!", "don't we'll I'VE", "naïve façade Ångström",
    "e\u0301 o\u0308 n\u0303", "ﬁ ½ ² Ⅷ", "你好，世界。", "日本語のテキスト", "한국어 문장",
    "مرحبا بالعالم", "שלום עולם", "नमस्ते दुनिया", "Здравствуй, мир", "👩‍🚀🏽", "😀😃", "🇫🇷",
    "def f(x: int) -> str:\n    return f'{x:>10}'", "for (int i = 0; i < n; ++i) {\n\t\ta[i] += 1;\n}",
    "<div class=\"a\">&nbsp;</div>", "{\"a\": [1, 2.5e-3, null]}", "SELECT * FROM t WHERE x <> 'y';",
    "https://example.org/a?b=c&d=%20", "1234567890", "3.14159", "0x1F", "12,345.67 €", "  ", "    ",
    "     ", "       ", "\n    return x", "\n        if a:",
    "[INST]", "[/INST] ",
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
