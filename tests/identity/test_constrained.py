"""Constrained answers match their grammar, and are the same on every phase, alone and beside others."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from common.request import SamplingParams
from tests.identity.support import MASKED, PLAIN, Arrival, Subject, check, pairs, prompt_of
from tests.support.engines import Variant
from tests.support.grammars import FORMS

MAX_NEW_TOKENS = 96


def arrivals_of(subject: Subject, *, most: int, seed: int) -> list[Arrival]:
    """Return requests of every form, greedy and sampled, and some without a form, of up to `most` tokens."""
    params = [SamplingParams(temperature=1.0, seed=i, max_new_tokens=24) for i in range(6)]
    for i, form in enumerate(FORMS):
        params.append(SamplingParams(temperature=0.0, max_new_tokens=most, grammar=form.grammar))
        sampled = {"temperature": 1.2, "seed": i, "top_p": 0.95 if i % 2 else 1.0, "logprobs": 1}
        params.append(SamplingParams(max_new_tokens=most, grammar=form.grammar, **sampled))
    random.Random(seed).shuffle(params)
    return [Arrival(i // 3, prompt_of(subject, 5 + i % 23, seed=i), each) for i, each in enumerate(params)]


@pairs(["zoo:llama-tiny", "zoo:gemma3-tiny"], MASKED, often=PLAIN)
def test_the_same_alone_and_beside_others(subject: Subject, variant: Variant) -> None:
    assert_the_same(subject, variant, most=32)


@pytest.mark.slow
@pairs(["zoo:llama-tiny"])
def test_and_when_answers_are_long(subject: Subject, variant: Variant) -> None:
    assert_the_same(subject, variant, most=MAX_NEW_TOKENS)


def assert_the_same(subject: Subject, variant: Variant, most: int) -> None:
    arrivals = arrivals_of(subject, most=most, seed=1)
    check(subject, variant, arrivals, max_batch_size=8, max_waiting_requests=len(FORMS) * 3)


@pytest.mark.parametrize(
    "subject",
    [
        "zoo:llama-tiny",
        *(pytest.param(f"zoo:{name}-tiny", marks=pytest.mark.slow) for name in ("qwen3", "gemma3")),
    ],
    indirect=True,
)
def test_every_answer_that_ends_of_itself_is_what_was_asked_for(subject: Subject) -> None:
    forms = {form.grammar: form for form in FORMS}
    ended: Counter[str] = Counter()
    arrivals = [
        each for each in arrivals_of(subject, most=MAX_NEW_TOKENS, seed=1) if each.params.grammar is not None
    ]
    for arrival in arrivals:
        tokens = subject.alone(arrival.prompt, arrival.params).tokens
        form = forms[arrival.params.grammar]
        text = subject.tokenizer.decode(tokens)
        if len(tokens) < MAX_NEW_TOKENS:
            assert form.matches(text), (form.name, text)
            ended[form.name] += 1
    assert len(ended) >= len(FORMS) - 2, set(map(str, FORMS)) - set(ended)
    assert ended.total() >= 0.8 * len(arrivals)
