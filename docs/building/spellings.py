"""Texts that more than one sequence of tokens can spell: old answers in chats, and texts that a grammar forces.

All numbers are computed with the tokenizer of the tiny model, an engine of phase 8 and the server's grammar
matchers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from common.constrained.grammar import Grammar, GrammarCompiler
from common.engine.engine import Engine
from common.models.registry import open_checkpoint
from common.request import SamplingParams
from common.text.tokenizer import Tokenizer
from docs.building.markdown import table
from phase8_prefix import Config, build_engine

MODEL = "zoo:llama-tiny"
BLOCK = 16  # tokens in a block of the KV cache, the default
ODD = ("Ġcr", "ou", "r", "ite")  # the model once sampled these tokens, at temperature 0.7
SYSTEM = "You are a kind bear. You answer with a short story about a friend, and you always tell how it ends."
#: Questions and answers. The first two answers contain the odd word.
TURNS = (
    (
        "Who lived in the wood?",
        " A friend crourite lived in the wood by the river. One day he went to the lake and looked for a boat. The "
        "boat was old and red, and he was very happy. He told his friend about it, and they went home.",
    ),
    (
        "What did they find?",
        " They found a crourite key under the big tree. It was the key of the old house on the hill. They "
        "looked for the door, and the door was open. They went in, and there was a cake for them.",
    ),
    ("Where did they go?", " They went home."),
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "animal": {"enum": ["bear", "dog", "squirrel"]},
        "friendly": {"type": "boolean"},
    },
    "required": ["name", "animal", "friendly"],
    "additionalProperties": False,
}
JSON = '{"name": "Mia", "animal": "squirrel", "friendly": true}'
FORCED_TEXT = 'friendly"'  # a text that the grammar forces in this answer


@functools.cache
def tokenizer() -> Tokenizer:
    return open_checkpoint(MODEL).tokenizer()


def encode(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def spelled(token_ids: Sequence[int]) -> str:
    """Return the texts of tokens, each in code font, with spaces shown as ␣."""
    return " ".join(f"`{tokenizer().spelled(token_id).replace('Ġ', '␣')}`" for token_id in token_ids)


# ---------------------------------------------------------------------- chats that come back as text


def odd_ids() -> list[int]:
    """Return the token ids of the odd word as the model sampled them."""
    backend = tokenizer().backend
    return [backend.token_to_id(piece) for piece in ODD]


def sampled_ids(text: str) -> list[int]:
    """Return an answer's token ids as the model sampled them: the ids of the encoded text, except that the odd word
    has the sampled ids."""
    before, word, after = text.partition(tokenizer().decode(odd_ids()))
    return encode(before) + (odd_ids() if word else []) + encode(after)


class Turn(NamedTuple):
    """The length of a turn's prompt, and how many of its tokens were found in the cache (hits).

    Both were measured twice: with the chat sent as text, and with the chat sent as token ids.
    """

    text_tokens: int
    text_hits: int
    ids_tokens: int
    ids_hits: int


@functools.cache
def chat() -> tuple[Turn, ...]:
    """Serve a chat of several turns twice: with old answers sent as text, and sent as the token ids that were
    sampled."""
    options: dict[str, Any] = {"device": "cpu", "max_batch_size": 1, "max_seq_len": 512, "block_size": BLOCK}
    engine = build_engine(Config(model=MODEL, **options))
    by_text, by_ids = list(_serve(engine, as_text=True)), list(_serve(engine, as_text=False))
    return tuple(Turn(*one, *other) for one, other in zip(by_text, by_ids, strict=True))


def _serve(engine: Engine, *, as_text: bool) -> Iterator[tuple[int, int]]:
    engine.reset_prefix_cache()
    text, token_ids = SYSTEM, encode(SYSTEM)
    for question, answer in TURNS:
        text, token_ids = f"{text}\n{question}", token_ids + encode(f"\n{question}")
        prompt = encode(text) if as_text else token_ids
        yield len(prompt), _cached(engine, prompt)
        # Caches the blocks that generating the answer would cache: its last token is sampled and never computed.
        _cached(engine, prompt + sampled_ids(answer)[:-1])
        text, token_ids = text + answer, token_ids + sampled_ids(answer)


def _cached(engine: Engine, token_ids: Sequence[int]) -> int:
    """Serve a request to its end. Returns how many tokens of its prompt were found in the cache."""
    request = engine.create_request(token_ids, SamplingParams(temperature=0.0, max_new_tokens=1))
    engine.add_request(request)
    while engine.has_work:
        engine.step()
    return request.cached_tokens


def retokenized_word() -> str:
    """Return the odd word's tokens as sampled and as encoded again, as a table."""
    word = tokenizer().decode(odd_ids())
    rows = [
        ["sampled by the model", spelled(odd_ids()), _ids(odd_ids())],
        ["encoded from the text", spelled(encode(word)), _ids(encode(word))],
    ]
    return table([f"`{word.strip()}`", "tokens", "ids"], rows, "lll")


def _ids(token_ids: Sequence[int]) -> str:
    return ", ".join(map(str, token_ids))


def retokenized_chat() -> str:
    """Return the table of the chat's turns and their hits."""
    rows = [
        [f"{place}", f"{turn.text_tokens}", f"{turn.text_hits}", f"{turn.ids_tokens}", f"{turn.ids_hits}"]
        for place, turn in enumerate(chat(), start=1)
    ]
    head = ["turn", "prompt as text, tokens", "hits", "prompt as ids, tokens", "hits"]
    return table(head, rows, "rrrrr")


# ---------------------------------------------------------------------- tokens that a grammar forces


class Run(NamedTuple):
    """A sampled token of the answer (None: the answer's beginning), and the tokens that are forced after it."""

    sampled: int | None
    forced: tuple[int, ...]


@functools.cache
def forced_runs() -> tuple[Run, ...]:
    """Return the answer `JSON` under the grammar of `SCHEMA`, divided into sampled tokens and forced tokens."""
    checkpoint = open_checkpoint(MODEL)
    compiler = GrammarCompiler(tokenizer(), checkpoint.config.eos_token_ids)
    try:
        matcher = compiler.new_matcher(Grammar.json_schema(SCHEMA))
        rest, runs, sampled = encode(JSON), [], None
        while True:
            forced = tuple(matcher.forced())
            assert list(forced) == rest[: len(forced)], "the answer is spelled otherwise"
            runs.append(Run(sampled, forced))
            for token_id in forced:
                matcher.advance(token_id)
            rest = rest[len(forced) :]
            if not rest:
                return tuple(runs)
            sampled, *rest = rest
            matcher.advance(sampled)
    finally:
        compiler.close()


def forced_answer() -> str:
    """Return the tokens of the answer `JSON`, each in code font."""
    return spelled(encode(JSON)) + "\n"


def forced_table() -> str:
    """Return the table of each sampled token after which the grammar forces tokens, and the forced tokens."""
    rows = [
        [spelled([run.sampled]) if run.sampled is not None else "(begin)", spelled(run.forced)]
        for run in forced_runs()
        if run.forced
    ]
    return table(["after", "the grammar forces"], rows, "ll")


def forced_fact(name: str) -> str:
    """Return one number for a sentence of the page.

    Args:
        name: `tokens`: of the answer; `forced`: tokens that the grammar forces; `passes`: sampled tokens, each of
            which needs a pass; `spellings`: token sequences that spell `FORCED_TEXT`.
    """
    runs = forced_runs()
    forced = sum(len(run.forced) for run in runs)
    sampled = sum(run.sampled is not None for run in runs)
    return {
        "tokens": f"{forced + sampled}",
        "forced": f"{forced}",
        "passes": f"{sampled}",
        "spellings": f"{spellings(FORCED_TEXT)}",
    }[name]


def spellings(text: str) -> int:
    """Return how many different sequences of tokens of the vocabulary spell a text."""
    known = tokenizer()
    vocabulary = {known.decode([token_id]) for token_id in range(known.vocab_size)} - {""}
    ways = [1] + [0] * len(text)
    for end in range(1, len(text) + 1):
        ways[end] = sum(ways[start] for start in range(end) if text[start:end] in vocabulary)
    return ways[-1]
