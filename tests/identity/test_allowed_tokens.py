"""`allowed_token_ids` and `bad_words` have the same bits on every phase, alone and beside others."""

from __future__ import annotations

from typing import Any

from common.request import SamplingParams
from tests.identity.support import MASKED, PLAIN, Arrival, Subject, check, greedy, pairs, prompt_of
from tests.support.engines import Variant
from tests.support.grammars import FORMS

WORDS = ("the", "fox", "a", ".", "lived in", "to the", "e")


@pairs(["zoo:llama-tiny", "zoo:gemma3-tiny"], MASKED, often=PLAIN)
def test_the_same_alone_and_beside_others(subject: Subject, variant: Variant) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "bad_words": WORDS},
        {"temperature": 1.0, "seed": 1, "bad_words": WORDS[3:], "min_tokens": 8},
        {"temperature": 0.0, "allowed_token_ids": tuple(range(200, 500))},
        {
            "temperature": 1.2,
            "seed": 2,
            "allowed_token_ids": tuple(range(0, 900, 3)),
            "repetition_penalty": 1.2,
        },
        {"temperature": 0.8, "seed": 3, "top_p": 0.9, "bad_words": ("q", "he"), "logprobs": 2},
        {"temperature": 0.0, "grammar": FORMS[0].grammar, "bad_words": ("x",)},
    ]
    text = tuple(subject.tokenizer.encode("Once upon a time there was a brave"))
    arrivals = [
        Arrival(
            i // 2, (*prompt_of(subject, 11 * i, seed=i), *text), SamplingParams(max_new_tokens=24, **kind)
        )
        for i, kind in enumerate(kinds)
    ]
    arrivals += [Arrival(1, prompt_of(subject, 30, seed=9), greedy(20))]
    check(subject, variant, arrivals, max_batch_size=4)
    free, restricted = (subject.alone(arrivals[0].prompt, p) for p in (greedy(24), arrivals[0].params))
    assert free.tokens != restricted.tokens
