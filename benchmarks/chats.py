"""Messages that people might write to a model: questions, code to edit, a document, and chats of several turns.

The texts lie in `benchmarks/texts`. The same seed draws the same messages on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path

TEXTS = Path(__file__).parent / "texts"

#: The type of a function that draws chats. Its arguments are a random generator, the number of chats, and the
#: number of user messages in each chat. It returns a list of user messages for each chat.
DrawChats = Callable[[random.Random, int, int], list[list[str]]]

SHORT = 0.25  # share of the messages of `long_documents` that are short questions


def read(name: str) -> str:
    return (TEXTS / name).read_text("utf-8")


def questions(draw: random.Random, chats: int, turns: int) -> list[list[str]]:
    """Return chats that begin with a question. Their later messages ask more about the answer."""
    first, more = read("questions.txt").splitlines(), read("followups.txt").splitlines()
    return [[question, *draw.sample(more, turns - 1)] for question in draw.sample(first, chats)]


def code_edits(draw: random.Random, chats: int, _turns: int) -> list[list[str]]:
    """Return chats of one message, which holds some code and asks for a change in it."""
    pairs = list(product(read("edits.txt").splitlines(), read("code.txt").split("---\n")))
    return [[f"{edit}\n\n```python\n{code}```"] for edit, code in draw.sample(pairs, chats)]


def long_documents(draw: random.Random, chats: int, _turns: int) -> list[list[str]]:
    """Return chats of one message. Three of four messages hold most sections of a document, in random order, and
    ask for a summary. The other messages are short questions."""
    title, *parts = read("handbook.md").split("\n## ")
    short = round(SHORT * chats)
    messages = [question for [question] in questions(draw, short, 1)]
    for _ in range(chats - short):
        chosen = draw.sample(parts, draw.randint(8, len(parts)))
        document = "\n## ".join([title, *chosen])
        messages.append(f"{document}\n\nSummarise this handbook for a visitor in a few sentences.")
    draw.shuffle(messages)
    return [[message] for message in messages]


def shared_document(draw: random.Random, chats: int, _turns: int) -> list[list[str]]:
    """Return chats of one message. All messages begin with the same document. Each message asks to quote the
    sentences about one topic that matter most to one kind of reader."""
    document = read("handbook.md")
    titles = [part.partition("\n")[0] for part in document.split("\n## ")[1:]]
    asked = [
        f"Quote the sentences about {title.lower()} that matter most to {reader}."
        for title, reader in product(titles, ("a visitor", "a child", "a sailor", "the town council"))
    ]
    return [[f"{document}\n\n{each}"] for each in draw.sample(asked, chats)]


CHATS: Mapping[str, DrawChats] = {
    "questions": questions,
    "code_edits": code_edits,
    "long_documents": long_documents,
    "shared_document": shared_document,
    "chats": questions,
}
