"""`allowed_token_ids` and `bad_words`: masks against plain lists, spellings, and requests with no token left."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.constrained.allowed_tokens import AllowedTokens, Mask, spellings
from common.constrained.grammar import Grammar
from common.errors import NoTokenLeftError
from common.models.registry import open_checkpoint
from common.request import Request, SamplingParams
from common.startup.phases import phase_names
from common.text.tokenizer import Tokenizer
from tests.support.engines import (
    EOS,
    VOCAB,
    RememberingModel,
    add,
    assert_all_free,
    assert_answered,
    build,
    build_constrained,
    byte_tokenizer,
    end_of,
    greedy,
    run,
    text_of,
    tokens_of,
)
from tests.support.models import ZOO_NAMES


def tokens_in(mask: Mask) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


IDS = st.integers(0, 69)


@given(
    allowed=st.none() | st.sets(IDS, min_size=1),
    words=st.lists(st.lists(IDS, min_size=1, max_size=3), max_size=6),
    generated=st.lists(IDS, max_size=6),
)
def test_a_mask_against_plain_lists(
    allowed: set[int] | None, words: list[list[int]], generated: list[int]
) -> None:
    tokens = AllowedTokens(70, allowed, words)
    expected = {
        token
        for token in (range(70) if allowed is None else allowed)
        if not any([*generated, token][-len(word) :] == word for word in words)
    }
    assert tokens_in(tokens.mask(generated)) - {*range(70, 96)} == expected
    latest = generated[len(generated) - min(tokens.context, len(generated)) :]
    assert tokens_in(tokens.mask(latest)) == tokens_in(tokens.mask(generated))
    assert tokens.context <= max((len(word) - 1 for word in words), default=0)


# ---------------------------------------------------------------------- words and their tokens


@pytest.mark.parametrize("name", ZOO_NAMES)
@pytest.mark.parametrize("word", ["fox", "Zoë", "brave fox", "Once", " fox", "the"])
def test_a_word_is_spelled_without_and_with_a_space(name: str, word: str) -> None:
    tokenizer = open_checkpoint(f"zoo:{name}").tokenizer()
    found = spellings(tokenizer, word)
    assert {tokenizer.decode(ids).strip() for ids in found} == {word.strip()}
    for text in (word.strip(), " " + word.strip()):  # one of the spellings forbids each form
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert any(ids[-len(spelling) :] == spelling for spelling in found)


# ---------------------------------------------------------------------- in an engine


def spell(text: bytes) -> RememberingModel:
    """Return a model that repeats a text for ever. Its second choice is always `-`, and its third EOS."""

    def rule(token_ids: Sequence[int]) -> torch.Tensor:
        logits = torch.zeros(VOCAB)
        logits[text[len(token_ids) % len(text)]] = 20.0
        logits[ord("-")] = 10.0
        logits[EOS] = 5.0
        return logits

    return RememberingModel(rule)


EVERY_PHASE = pytest.mark.parametrize("phase", phase_names())


@EVERY_PHASE
@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"bad_words": ("c",)}, "ab-dab-dab"),
        ({"bad_words": ("bcd",)}, "abc-abc-ab"),
        ({"bad_words": ("bcd", "ab")}, "a-cda-cda-"),
        ({"allowed_token_ids": (97, 98, 45)}, "ab--ab--ab"),
        ({"allowed_token_ids": (97, 98, 45), "bad_words": ("b-",)}, None),
    ],
    ids=str,
)
def test_forbidden_words_never_come(phase: str, params: dict[str, tuple[str, ...]], text: str | None) -> None:
    engine = build(phase, spell(b"abcd"))
    request = add(engine, [1] * 4, greedy(10, **params))  # type: ignore[arg-type]
    free = add(engine, [1] * 4, greedy(10))
    outputs = run(engine)
    said = text_of(outputs, request)
    assert said == text if text is not None else "b-" not in said
    assert text_of(outputs, free) == "abcdabcdab"
    assert_all_free(engine)


@EVERY_PHASE
def test_a_request_without_a_token_left_fails_alone(phase: str) -> None:
    engine = build_constrained(phase)
    stuck = add(engine, "x", greedy(9, grammar=Grammar.choice(["ab"]), bad_words=("b",)))
    others = [add(engine, [i, 1, 2], greedy(6)) for i in range(3)]
    outputs = run(engine)
    end = end_of(outputs, stuck)
    assert isinstance(end.error, NoTokenLeftError)
    assert tokens_of(outputs, stuck) == [97]
    assert_answered(outputs, others)
    assert_all_free(engine)


def test_only_words_of_several_tokens_wait_for_the_token_before() -> None:
    """Phase 9 samples before it has read earlier tokens, unless the next token depends on them."""

    def waits(tokenizer: Tokenizer, **fields: object) -> bool:
        params = SamplingParams(**fields)  # type: ignore[arg-type]
        allowed = AllowedTokens.of(tokenizer, params.allowed_token_ids, params.bad_words)
        return Request("r", [1], params, allowed=allowed).sampling.waits_for_tokens

    tokenizer = byte_tokenizer()
    assert not waits(tokenizer, bad_words=("a", "b"), allowed_token_ids=(1, 2))
    assert waits(tokenizer, bad_words=("ab",))
    assert not waits(tokenizer)
