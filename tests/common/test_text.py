"""Incremental detokenization: the text is that of decoding at once, without half characters and stop strings."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.models.registry import ZOO, open_checkpoint
from common.text.tokenizer import IncrementalDetokenizer, Tokenizer
from tests.support.engines import EOS, byte_alphabet, byte_tokenizer
from tests.support.models import ZOO_NAMES

FAMILY = "👨‍👩‍👧"  # three people and two joiners: 18 bytes


@functools.cache
def zoo(name: str) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_file(str(ZOO / name / "tokenizer.json"))
    return Tokenizer(backend, vocab_size=backend.get_vocab_size() + 10)


@pytest.fixture(params=ZOO_NAMES)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return zoo(request.param)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def tell(
    tokenizer: Tokenizer, token_ids: Sequence[int], *, prompt: Sequence[int] = (), stop: Sequence[str] = ()
) -> list[str]:
    """Return the delta of each token, and the rest at the end."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, stop)
    deltas = [detokenizer.add(token_id) for token_id in token_ids if detokenizer.stopped_by is None]
    return [*deltas, detokenizer.finish()]


# ---------------------------------------------------------------------- the same text as at once

# A tokenizer may normalize the text (NFC), so deltas are compared with the decoded text, not with the original.
WORDS = ["a", "Word", "1", "23", "4567", ".", ",", "!", "'s", "<", ">", "{", "▁", "\u200d"]
WORDS += [
    "\ufffd",
    "é",
    "e\u0301",
    "ß",
    "中",
    "国",
    "日本",
    "語",
    "한",
    "ا",
    "ह",
    "😀",
    "👍🏽",
    "🏳️\u200d🌈",
    "🇫🇷",
]
CHARACTERS = st.one_of(
    st.sampled_from([*WORDS, FAMILY, " ", "  ", "\n", "\n\n", "\t"]),
    st.characters(exclude_categories=["Cs"]),
)
TEXTS = st.lists(CHARACTERS, max_size=20).map("".join)


@pytest.mark.parametrize("name", ZOO_NAMES)
@settings(max_examples=100)
@given(text=TEXTS, cut=st.integers(0, 100))
@example(text=FAMILY * 3, cut=9)
@example(text="  two spaces", cut=0)
@example(text="中国日本語", cut=4)
@example(text="end \n\n\n", cut=1)
@example(text="a \ufffd🦉 b", cut=1)
@example(text="\ufffd\ufffd你好", cut=3)
@example(text="caf\ufffd", cut=0)
def test_deltas_join_to_the_text_decoded_at_once(name: str, text: str, cut: int) -> None:
    """The prompt may end between any two characters."""
    tokenizer = zoo(name)
    everything = encode(tokenizer, text)
    cut = min(cut, len(everything))
    prompt, generated = everything[:cut], everything[cut:]
    while generated and tokenizer.decode(prompt).endswith("\ufffd"):  # a prompt of whole characters
        prompt, generated = [*prompt, generated[0]], generated[1:]
    whole, before = tokenizer.decode(everything), tokenizer.decode(prompt)
    assert whole.startswith(before)
    assert "".join(tell(tokenizer, generated, prompt=prompt)) == whole[len(before) :]


@settings(max_examples=100)
@given(text=TEXTS, seed=st.integers(0, 1000))
def test_tokens_may_begin_and_end_anywhere_in_a_character(text: str, seed: int) -> None:
    """Byte-level vocabularies may have many tokens in a row that end one character and begin the next."""
    rng = random.Random(seed)
    data = text.encode()
    cuts = sorted({0, len(data), *(rng.randrange(len(data) + 1) for _ in range(len(data) // 2))})
    pieces = [data[i:j] for i, j in itertools.pairwise(cuts)]
    longer = list(dict.fromkeys(piece for piece in pieces if len(piece) > 1))
    tokenizer = byte_tokenizer(longer)
    ids = [piece[0] if len(piece) == 1 else EOS + 1 + longer.index(piece) for piece in pieces]
    assert tokenizer.decode(ids) == text
    deltas = tell(tokenizer, ids)
    assert "".join(deltas) == text


# ---------------------------------------------------------------------- never half a character


@pytest.mark.parametrize("text", ["😀", FAMILY, "a😀b", "中😀\n", "🇫🇷🇫🇷"])
def test_an_emoji_split_over_tokens_is_never_shown_in_part(tokenizer: Tokenizer, text: str) -> None:
    ids = encode(tokenizer, text)
    assert len(ids) > len(text), "the zoo's tokenizers split every emoji"
    said = ""
    for delta in tell(tokenizer, ids):
        said += delta
        assert text.startswith(said)
    assert said == text


def byte_token(tokenizer: Tokenizer, byte: int) -> int:
    """Return the token of a single byte, in a byte-fallback or a byte-level vocabulary."""
    names = (f"<0x{byte:02X}>", byte_alphabet()[byte])
    return next(i for name in names if (i := tokenizer.backend.token_to_id(name)) is not None)


def test_broken_bytes_show_after_four_tokens_and_later_text_is_heard(tokenizer: Tokenizer) -> None:
    broken = byte_token(tokenizer, 0xFE)
    detokenizer = IncrementalDetokenizer(tokenizer, encode(tokenizer, "Hi"))
    assert [detokenizer.add(broken) for _ in range(4)] == ["", "", "", "\ufffd" * 4]
    assert "".join(detokenizer.add(i) for i in encode(tokenizer, "later 😀")).endswith("later 😀")


@pytest.mark.parametrize("name", ZOO_NAMES)
@settings(max_examples=100)
@given(data=st.lists(st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFE, 0x41]), max_size=12))
@example(data=[0xF0, 0x9F, 0x41])
def test_after_any_bytes_later_text_is_heard(name: str, data: list[int]) -> None:
    """Half characters may stand anywhere, and with byte fallback a token may change how those before it decode."""
    tokenizer = zoo(name)
    ids = [*(byte_token(tokenizer, byte) for byte in data), *encode(tokenizer, " later 😀")]
    assert "".join(tell(tokenizer, ids)).endswith("later 😀")


@pytest.mark.parametrize(
    "tail", ["😀", FAMILY, "x" + FAMILY, "中" + FAMILY, FAMILY * 2, "日本語" * 3 + "x😀", "Hi", "caf\ufffd"]
)
def test_nothing_of_the_prompt_shows_in_the_answer(tokenizer: Tokenizer, tail: str) -> None:
    """The detokenizer reads the prompt's last tokens for the spacing. It never begins within a character."""
    for filler in range(6):
        prompt = encode(tokenizer, "." * filler + tail)
        assert "".join(tell(tokenizer, encode(tokenizer, "so"), prompt=prompt)) == "so"


# ---------------------------------------------------------------------- special and foreign ids


def test_special_tokens_are_left_out_and_foreign_ids_print_as_numbers(tokenizer: Tokenizer) -> None:
    special, foreign = sorted(tokenizer.special_ids), tokenizer.foreign_from
    assert len(special) >= 3
    assert tokenizer.is_foreign(foreign)
    assert not tokenizer.is_foreign(foreign - 1)
    a, b, emoji = (encode(tokenizer, text) for text in ("a", "b", "😀"))
    *first, last = emoji
    for ids, text in (
        ([*special, *a, *special, *b, *special], "ab"),
        ([special[0]] * 10, ""),  # special tokens are not taken for broken bytes
        ([*a, *first, special[0], last], "a😀"),
        ([*a, foreign, foreign + 1, *b], f"a<{foreign}><{foreign + 1}>b"),
        ([*a, byte_token(tokenizer, 0xF0), foreign, *b], f"a\ufffd<{foreign}>b"),
        ([byte_token(tokenizer, 0xFE), *a], "\ufffda"),
    ):
        assert "".join(tell(tokenizer, ids)) == tokenizer.decode(ids) == text
    assert "".join(tell(tokenizer, b, prompt=[*a, foreign])) == "b"


# ---------------------------------------------------------------------- stop strings


def cut_at_first_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Return the text before the first complete stop string (of several, the longest), and that stop string."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def longest_begun_stop(text: str, stops: Sequence[str]) -> int:
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


LETTERS = st.text(alphabet="ab1\n", max_size=40)


@settings(max_examples=200)
@given(
    text=LETTERS,
    stops=st.lists(st.text(alphabet="ab1\n", min_size=1, max_size=5), max_size=4),
    seed=st.integers(0, 10_000),
)
@example(text="aab", stops=["ab"], seed=0)
@example(text="xabcab", stops=["abcd", "b"], seed=0)
@example(text="abc", stops=["abc", "bc", "c"], seed=0)
def test_stop_strings_against_a_plain_reading(text: str, stops: list[str], seed: int) -> None:
    """For any cut into tokens, the text ends before the first stop string, and none is held longer than needed."""
    rng = random.Random(seed)
    pieces: list[str] = []
    left = text
    while left:
        size = rng.randint(1, 6)
        pieces.append(left[:size])
        left = left[size:]
    longer = list(dict.fromkeys(p.encode() for p in pieces if len(p) > 1))
    tokenizer = byte_tokenizer(longer)
    ids = [ord(p) if len(p) == 1 else EOS + 1 + longer.index(p.encode()) for p in pieces]
    expected, stopped = cut_at_first_stop(text, stops)
    detokenizer = IncrementalDetokenizer(tokenizer, (), stops)
    said = heard = ""
    for token_id, piece in zip(ids, pieces, strict=True):
        said += detokenizer.add(token_id)
        heard += piece
        assert detokenizer.stopped_by == cut_at_first_stop(heard, stops)[1]
        if detokenizer.stopped_by is not None:
            break
        assert said == heard[: len(heard) - longest_begun_stop(heard, stops)]
    said += detokenizer.finish()
    assert (said, detokenizer.stopped_by) == (expected, stopped)
    shown = IncrementalDetokenizer(tokenizer, (), stops, include_stop=True)
    said = "".join(shown.add(token_id) for token_id in ids if shown.stopped_by is None)
    ends = (end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops))
    assert (said + shown.finish(), shown.stopped_by) == (text[: next(ends, len(text))], stopped)


@pytest.mark.parametrize(
    ("text", "stops", "min_tokens", "said", "stopped"),
    [
        ("anENDed", ["END"], 4, "an", "END"),  # the fifth token completes END
        ("anENDed", ["END"], 5, "anENDed", None),
        ("anENDed", ["END"], 99, "anENDed", None),
        ("aaa", ["aa"], 2, "a", "aa"),  # begun by a token that could not stop, completed by one that could
        ("anENDed", ["END", "ENDING"], 5, "anENDed", None),  # held for ENDING; END came too early
        ("anENDING", ["END", "ENDING"], 5, "an", "ENDING"),
    ],
)
def test_no_stop_string_is_completed_by_the_first_tokens(
    text: str, stops: list[str], min_tokens: int, said: str, stopped: str | None
) -> None:
    detokenizer = IncrementalDetokenizer(byte_tokenizer(), [], stops, min_tokens)
    heard = ""
    for token_id in text.encode():
        heard += detokenizer.add(token_id)
        if detokenizer.stopped_by is not None:
            break
    assert (heard + detokenizer.finish(), detokenizer.stopped_by) == (said, stopped)


@pytest.mark.parametrize(
    ("said", "stop", "deltas"),
    [
        ("the END!", "END", [*"the ", "", "", "", ""]),
        ("the ENJ", "END", [*"the ", "", "", "ENJ", ""]),
        ("the EN", "END", [*"the ", "", "", "EN"]),
        ("a 😀b", "😀", ["a", " ", *[""] * 5]),
    ],
)
def test_a_stop_string_over_several_tokens_never_leaks(said: str, stop: str, deltas: list[str]) -> None:
    assert tell(byte_tokenizer(), said.encode(), prompt=b"EN", stop=[stop]) == deltas


# ---------------------------------------------------------------------- the tokenizer itself


@pytest.mark.parametrize("name", ZOO_NAMES)
@settings(max_examples=100)
@given(text=TEXTS)
def test_ids_are_those_of_the_library(name: str, text: str) -> None:
    tokenizer = zoo(name)
    for given_text in (text, tokenizer.token_text(min(tokenizer.special_ids)) + text):
        assert tokenizer.encode(given_text) == tokenizer.backend.encode(given_text).ids
        plain = tokenizer.backend.encode(given_text, add_special_tokens=False)
        assert encode(tokenizer, given_text) == plain.ids


@pytest.mark.parametrize("name", ZOO_NAMES)
def test_messages_may_spell_special_tokens_as_text(name: str) -> None:
    usual, escaping = (open_checkpoint(f"zoo:{name}").tokenizer() for _ in range(2))
    escaping.escape_special_tokens()
    specials = "".join(map(usual.spelled, usual.special_ids))
    asked: list[dict[str, Any]] = [{"role": "user", "content": f"Say {specials}!"}]
    begun = [*asked, {"role": "assistant", "content": f"I say{specials}"}]
    plain = [{"role": "user", "content": "Say!"}]
    plainly_begun = [*plain, {"role": "assistant", "content": "I say"}]

    def special_ids(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[int]:
        assert tokenizer.chat_template is not None
        ids = tokenizer.encode(tokenizer.chat_template.render(messages), add_special_tokens=False)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert text.count(specials) == sum(specials in message["content"] for message in messages)
        return [token_id for token_id in ids if token_id in tokenizer.special_ids]

    assert special_ids(escaping, asked) == special_ids(usual, plain) == special_ids(escaping, plain)
    assert special_ids(escaping, begun) == special_ids(usual, plainly_begun)
    assert len(special_ids(usual, asked)) == len(special_ids(usual, plain)) + len(usual.special_ids)
    for text in ("", "A fox.", specials):  # other texts are as before
        assert escaping.encode(text) == usual.encode(text)


def test_the_prompts_tail_is_cut_before_a_character_wherever_foreign_ids_stand(tokenizer: Tokenizer) -> None:
    emoji, foreign = encode(tokenizer, "😀"), tokenizer.foreign_from
    for place in range(len(emoji) * 3 + 1):
        prompt = [*emoji * 3]
        prompt.insert(place, foreign)
        assert "".join(tell(tokenizer, encode(tokenizer, "so"), prompt=prompt)) == "so"


def test_special_tokens_may_be_shown(tokenizer: Tokenizer) -> None:
    special = sorted(tokenizer.special_ids)
    a, emoji = encode(tokenizer, "a"), encode(tokenizer, "😀")
    for ids in ([*special, *a, special[0], *emoji, special[-1]], [special[0]] * 10, [*a, special[1], *a]):
        shown = IncrementalDetokenizer(tokenizer, a, skip_special_tokens=False)
        text = "".join(map(shown.add, ids)) + shown.finish()
        assert text == tokenizer.decode(ids, skip_special_tokens=False)
        assert all(tokenizer.token_text(token_id) in text for token_id in ids if token_id in special)
