"""The correctness rule: every phase gives the tokens that `generate()` gives, whatever runs beside them.

Trained models hide mask errors behind confident predictions, so the logits of every step are compared as well, and
random weights are run beside the trained ones. Where a model is batch invariant (with native kernels), logits have
the same bits. Elsewhere sums run in other orders, and logits may differ within a bound.
"""

from __future__ import annotations

import random

import pytest
import torch

from common.request import SamplingParams
from tests.identity.support import (
    LOGIT_BOUND,
    MODELS,
    PLAIN,
    Arrival,
    Subject,
    check,
    greedy,
    pairs,
    per_model,
    prompt_of,
    recorded_logits,
    serve,
)
from tests.support.engines import Variant


def test_an_early_token_changes_the_logits(subject: Subject) -> None:
    """Otherwise the whole suite could pass with a model that ignores its context."""
    prompt = prompt_of(subject, 40, seed=3)
    other = (prompt[0], (prompt[1] + 7) % subject.model.config.vocab_size, *prompt[2:])
    first, second = (subject.alone(p, greedy(1)).logits[0] for p in (prompt, other))
    assert (first - second).abs().max() > 1e-2


@pairs(often=PLAIN)
def test_mixed_lengths_in_one_batch(subject: Subject, variant: Variant) -> None:
    """Padding must not shift positions. The prompt of 200 is longer than Gemma's windows (16), that of 3 is not."""
    arrivals = [Arrival(0, prompt_of(subject, n, seed=n), greedy(24)) for n in (3, 7, 200, 1, 16, 17, 64)]
    check(subject, variant, arrivals, max_batch_size=8)


@pairs([name for name in MODELS if not name.startswith("random:")], often=PLAIN)
def test_prompts_of_text_with_natural_ends(subject: Subject, variant: Variant) -> None:
    texts = ["Once upon a time", "The fox", "user: Tell me a story about a cat.", "Where is the"]
    arrivals = [
        Arrival(i, tuple(subject.tokenizer.encode(text)), greedy(60, ignore_eos=False))
        for i, text in enumerate(texts)
    ]
    check(subject, variant, arrivals, max_batch_size=3)


@per_model()
def test_random_traffic(subject: Subject, variants: list[Variant], pytestconfig: pytest.Config) -> None:
    """Requests of 1 to 300 tokens arrive at random steps. There are more requests than seats.

    The traffic is drawn by the seed of the tests' order, so the same command repeats it.
    """
    assert_random_traffic(subject, variants, random.Random(pytestconfig.getoption("order_seed") or 0))


@pytest.mark.slow
@per_model()
def test_more_random_traffic(subject: Subject, variants: list[Variant], pytestconfig: pytest.Config) -> None:
    assert_random_traffic(subject, variants, random.Random(pytestconfig.getoption("order_seed") or 1), 3)


def assert_random_traffic(
    subject: Subject, variants: list[Variant], draw: random.Random, times: int = 1
) -> None:
    for _ in range(times):
        arrivals = [
            Arrival(
                draw.randint(0, 30),
                prompt_of(subject, draw.randint(1, draw.choice((20, 300))), seed=draw.randint(0, 5)),
                greedy(draw.randint(1, 24)),
            )
            for _ in range(draw.randint(5, 10))
        ]
        seats = draw.randint(1, 4)
        for variant in variants:
            print(variant)  # the last one that is printed is the one that failed
            check(subject, variant, arrivals, max_batch_size=seats)


@pairs(often=PLAIN)
def test_a_seed_gives_the_same_tokens_alone_and_in_a_full_batch(subject: Subject, variant: Variant) -> None:
    params = [
        SamplingParams(
            temperature=0.7 if seed < 4 else 1.3,
            seed=seed,
            max_new_tokens=16,
            ignore_eos=True,
            top_k=50 if seed % 2 else None,
            top_p=0.9 if seed % 3 else 1.0,
        )
        for seed in range(8)
    ]
    arrivals = [Arrival(i % 3, prompt_of(subject, 10 + 9 * i, seed=i), p) for i, p in enumerate(params)]
    check(subject, variant, arrivals, max_batch_size=4)
    assert len({tuple(subject.alone(each.prompt, each.params).tokens) for each in arrivals}) == len(arrivals)


@pairs(["random:llama"], PLAIN)
def test_the_bound_is_not_generous(subject: Subject, variant: Variant) -> None:
    """Where batching changes the logits, the change (printed with -s) is far inside the bound."""
    if subject.model.batch_invariant:
        pytest.skip("the same bits: every other test here compares them")
    arrivals = [Arrival(0, prompt_of(subject, 5 + 23 * i, seed=i), greedy(8)) for i in range(6)]
    with recorded_logits() as logits:
        serve(subject.engine(variant, max_batch_size=6), arrivals)
    worst = 0.0
    for i, arrival in enumerate(arrivals):
        for got, expected in zip(
            logits[str(i)], subject.alone(arrival.prompt, arrival.params).logits, strict=True
        ):
            scale = max(1.0, expected.abs().max().item())
            worst = max(worst, (got - expected).abs().max().item() / scale)
    print(f"{variant}: largest relative logit difference {worst:.2e}")
    assert worst < LOGIT_BOUND / 2
    assert torch.isfinite(torch.tensor(worst))
