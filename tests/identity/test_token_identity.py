"""The correctness rule: every phase gives the tokens that `generate()` gives, whatever runs beside them.

Trained models hide mask errors behind confident predictions, so the logits of every step are compared as well, and
random weights are run beside the trained ones. Where a model is batch invariant (with native kernels), logits have
the same bits. Elsewhere sums run in other orders, and logits may differ within a bound.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from common.engine.engine import Engine
from common.request import Request, SamplingParams
from tests.identity.comparison import Arrival, Subject, check, check_on, greedy, prompt_of, subject_of
from tests.identity.forms import FORMS
from tests.identity.poison import Poison
from tests.identity.table import IN_EVERY_VARIANT, MODELS, PLAIN, VARIANTS, table
from tests.phase11_tiered.support import reading_pays, stop
from tests.support.engines import Variant
from tests.support.pools import assert_consistent, caching
from tests.support.streams import let_guess


@pytest.mark.parametrize("subject", MODELS, indirect=True)
def test_an_early_token_changes_the_logits(subject: Subject) -> None:
    """Otherwise the whole suite could pass with a model that ignores its context."""
    prompt = prompt_of(subject, 40, seed=3)
    other = (prompt[0], (prompt[1] + 7) % subject.model.config.vocab_size, *prompt[2:])
    first, second = (subject.alone(p, greedy(1)).logits[0] for p in (prompt, other))
    assert (first - second).abs().max() > 1e-2


@table()
def test_random_traffic(subject: Subject, variant: Variant, pytestconfig: pytest.Config) -> None:
    """Prompts of many lengths, texts with natural ends and drawn traffic, for which there are not seats enough.

    Gemma's windows (16) are shorter than some prompts and longer than others. Half of the requests are sampled by a
    seed. What no request owns is NaN: a pool does not clear memory, and masks would not help, for 0 × NaN is NaN.
    The traffic is drawn by the seed of the tests' order, so the same command repeats it.
    """
    draw = random.Random(pytestconfig.getoption("order_seed") or 0)
    lengths = [Arrival(i // 4, prompt_of(subject, n, seed=n), kinds(i)) for i, n in enumerate(LENGTHS)]
    texts = [
        Arrival(i, tuple(subject.tokenizer.encode(text)), greedy(40, ignore_eos=False))
        for i, text in enumerate(TEXTS)
    ]
    drawn = [
        Arrival(
            draw.randint(0, 20),
            prompt_of(subject, draw.randint(1, draw.choice((20, 300))), seed=draw.randint(0, 5)),
            greedy(draw.randint(1, 12)),
        )
        for _ in range(4)
    ]
    poisons: list[Poison] = []
    check(
        subject,
        variant,
        [*lengths, *texts, *drawn],
        prepare=lambda engine: poisons.append(Poison(engine)),
        max_batch_size=draw.randint(3, 5),
    )
    assert all(poison.past_an_end > 0 or poison.pool.block_size == 1 for poison in poisons)


LENGTHS = (3, 7, 200, 1, 16, 17, 64)
TEXTS = ("Once upon a time", "user: Tell me a story about a cat.")


def kinds(index: int) -> SamplingParams:
    """Return sampling parameters: every second request is greedy, the others are drawn with different filters."""
    if index % 2 == 0:
        return greedy(12)
    return SamplingParams(
        temperature=0.7 if index < 4 else 1.3,
        seed=index,
        max_new_tokens=12,
        ignore_eos=True,
        top_k=50 if index % 3 else None,
        top_p=0.9 if index % 3 != 1 else 1.0,
        repetition_penalty=1.2 if index == 5 else 1.0,
    )


# ---------------------------------------------------------------------- grammars, bad words, allowed tokens


def restricted_requests(subject: Subject, most: int) -> list[Arrival]:
    """Return requests of up to `most` tokens: some for each form, some with lists of tokens, and some without."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "bad_words": ("the", "fox", "a", ".", "lived in", "to the", "e")},
        {"temperature": 1.0, "bad_words": ("q", "he"), "min_tokens": 8, "top_p": 0.9},
        {"temperature": 0.0, "allowed_token_ids": tuple(range(200, 500))},
        {"temperature": 1.2, "allowed_token_ids": tuple(range(0, 900, 3)), "repetition_penalty": 1.2},
        {"temperature": 0.0, "grammar": FORMS[0].grammar, "bad_words": ("x",)},
        {"temperature": 1.0},
        *({"temperature": 1.2 * (i % 2), "grammar": form.grammar} for i, form in enumerate(FORMS)),
    ]
    random.Random(1).shuffle(kinds)
    return [
        Arrival(
            i // 3,
            prompt_of(subject, 5 + i % 23, seed=i),
            SamplingParams(**({"seed": i, "max_new_tokens": most} | kind)),
        )
        for i, kind in enumerate(kinds)
    ]


#: A mask must reach its row in each phase, and where steps overlap or guesses are verified.
MASKED = [*PLAIN, *(v for v in VARIANTS if hasattr(v.config(), "pipeline_depth") and v not in PLAIN)]


@table(models=[IN_EVERY_VARIANT], variants=MASKED, often=PLAIN)
def test_restricted_tokens(subject: Subject, variant: Variant) -> None:
    arrivals = restricted_requests(subject, most=20)
    check(subject, variant, arrivals, max_batch_size=8, max_waiting_requests=len(arrivals))


@pytest.mark.parametrize("subject", ["zoo:llama-tiny"], indirect=True)
def test_an_answer_that_ends_of_itself_has_the_form_that_was_asked_for(subject: Subject) -> None:
    forms = {form.grammar: form for form in FORMS}
    ended: set[str] = set()
    for arrival in restricted_requests(subject, most=96):
        form = forms.get(arrival.params.grammar)
        if form is None:
            continue
        tokens = subject.alone(arrival.prompt, arrival.params).tokens
        if len(tokens) < 96:
            text = subject.tokenizer.decode(tokens)
            assert form.matches(text), (form.name, text)
            ended.add(form.name)
    assert len(ended) >= 0.8 * len(FORMS), {form.name for form in FORMS} - ended


# ---------------------------------------------------------------------- chunks


@pytest.mark.parametrize("budget", ["a chunk", "none"])
@pytest.mark.parametrize("memory", [{"block_size": 4}, {"kv_cache_backend": "contiguous"}], ids=str)
@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_prompts_that_end_at_the_edge_of_a_chunk_or_a_window(
    chunk: int, memory: dict[str, Any], budget: str
) -> None:
    """Gemma's windows (16) begin inside a chunk, at its edge, or several chunks before."""
    subject = subject_of(IN_EVERY_VARIANT)
    options = memory | {
        "prefill_chunk_size": chunk,
        "prefill_token_budget": chunk if budget == "a chunk" else None,
    }
    lengths = sorted({1, max(1, chunk - 1), chunk, chunk + 1, 3 * chunk + 1, 15, 16, 17, 16 + chunk})
    arrivals = [Arrival(i, prompt_of(subject, n, seed=n), greedy(12)) for i, n in enumerate(lengths)]
    check(subject, Variant("phase7_chunked", options), arrivals, max_seq_len=80, max_batch_size=len(lengths))


# ---------------------------------------------------------------------- prefix hits

SYSTEM = 70  # shared first tokens: no multiple of a block size but 1, and more than Gemma's windows
NEW = 9


def first_turns(subject: Subject) -> list[Arrival]:
    """Return prompts with 0 to 40 own tokens after the shared ones, two of them equal. Half arrive later."""
    system = prompt_of(subject, SYSTEM, seed=1)
    own = [prompt_of(subject, n, seed=10 + n) for n in (26, 0, 1, 40, 10, 40)]
    return [Arrival(3 * (i // 3), (*system, *each), params_of(i)) for i, each in enumerate(own)]


def params_of(index: int) -> SamplingParams:
    """Return sampling parameters: every second request is sampled, the others are greedy."""
    if index % 2:
        return SamplingParams(temperature=0.9, seed=index, top_p=0.95, max_new_tokens=NEW, ignore_eos=True)
    return greedy(NEW)


def next_turns(subject: Subject, arrivals: Sequence[Arrival], tokens: dict[str, list[int]]) -> list[Arrival]:
    """Return prompts of prompt, answer and a few more tokens, in another order."""
    turns = [
        Arrival(i, (*each.prompt, *tokens[str(i)], *prompt_of(subject, 5, seed=i)), params_of(i + 1))
        for i, each in enumerate(arrivals)
    ]
    random.Random(3).shuffle(turns)
    return turns


@pytest.mark.parametrize(
    ("name", "phase", "options", "memory"),
    [
        (IN_EVERY_VARIANT, "phase8_prefix", {"block_size": 1, "prefill_chunk_size": 7}, "ample"),
        (IN_EVERY_VARIANT, "phase8_prefix", {"block_size": 4, "mixed_batches": False}, "tight"),
        (IN_EVERY_VARIANT, "phase8_prefix", {"block_size": 16, "use_chunked_prefill": False}, "ample"),
        (IN_EVERY_VARIANT, "phase9_pipelined", {"block_size": 4, "prefill_chunk_size": 33}, "ample"),
        ("bf16:llama-tiny", "phase8_prefix", {"block_size": 4, "prefill_chunk_size": 33}, "tight"),
    ],
    ids=str,
)
def test_a_prefix_hit_gives_the_bits_that_are_computed(
    name: str, phase: str, options: dict[str, Any], memory: str
) -> None:
    """Conversations begin alike and go on after their own answers. If memory is tight, blocks are evicted."""
    subject = subject_of(name)
    if not subject.model.batch_invariant and "bf16" in name:
        pytest.skip("bfloat16 is not batch invariant here")
    if memory == "tight":
        options = options | {"num_blocks": 176 // options["block_size"]}
    engine = subject.engine(Variant(phase, options), max_seq_len=200)
    arrivals = first_turns(subject)
    for _ in range(3):
        tokens = check_on(engine, subject, arrivals)
        assert_consistent(caching(engine))
        arrivals = next_turns(subject, arrivals, tokens)
    counters = engine.telemetry.counters
    assert counters.cached_tokens > (0 if memory == "tight" else SYSTEM * 8)
    assert (counters.evictions > 0) == (counters.preemptions > 0) == (memory == "tight")


@pytest.mark.parametrize(
    "name",
    [
        *(IN_EVERY_VARIANT, "bf16:llama-tiny"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("int8:gemma3-tiny", "int8-bf16:llama-tiny")
        ),
    ],
)
def test_a_hit_in_the_file_gives_the_bits_that_are_computed(name: str, tmp_path: Path) -> None:
    """The server starts anew before each turn of the conversations, and has memory for few of them."""
    subject = subject_of(name)
    if not subject.model.batch_invariant and "bf16" in name:
        pytest.skip("bfloat16 is not batch invariant here")
    options = {"block_size": 4, "num_blocks": 60, "kv_tier": tmp_path, "kv_tier_bytes": 2**24}
    arrivals, hits = first_turns(subject), []
    for _ in range(3):
        engine = subject.engine(Variant("phase11_tiered", options), max_seq_len=200)
        reading_pays(engine)
        tokens = check_on(engine, subject, arrivals)
        assert_consistent(caching(engine))
        hits.append(engine.telemetry.counters.tier_hits)
        stop(engine)
        arrivals = next_turns(subject, arrivals, tokens)
    assert min(hits[1:]) > SYSTEM / 4


# ---------------------------------------------------------------------- guesses


@pytest.mark.parametrize(
    ("subject", "options", "right", "wrong_by"),
    [
        ("bf16:llama-tiny", {"draft_length": 15, "draft_rows": 128}, 15, 0),
        ("bf16:llama-tiny", {"draft_length": 5, "draft_rows": 9, "prefill_chunk_size": 7}, 0, 1),
        ("bf16:llama-tiny", {"draft_length": 8, "draft_rows": 64, "block_size": 4, "num_blocks": 64}, 2, 1),
        (
            "bf16:llama-tiny",
            {"draft_length": 7, "draft_rows": 64, "pipeline_depth": 0, "mixed_batches": False},
            1,
            40,
        ),
        (IN_EVERY_VARIANT, {"draft_length": 8, "draft_rows": 64}, 2, 1),
    ],
    indirect=["subject"],
    ids=str,
)
def test_guesses_change_no_bit(subject: Subject, options: dict[str, Any], right: int, wrong_by: int) -> None:
    """Of each guess the first `right` tokens are right, and `wrong_by` is added to the ids of later ones."""
    arrivals = restricted_requests(subject, most=20)

    def guess(request: Request, token_ids: Sequence[int], limit: int) -> list[int]:
        answer = subject.alone(request.prompt_token_ids, request.params).tokens
        known = len(token_ids) - request.num_prompt_tokens
        following = [*answer[known : known + limit], *[1, 2, 3] * limit][:limit]
        return following[:right] + [(token + wrong_by) % 1000 for token in following[right:]]

    def prepare(engine: Engine) -> None:
        let_guess(engine, guess)

    variant = Variant("phase10_speculative", options)
    engine = check(subject, variant, arrivals, prepare, max_batch_size=6, max_waiting_requests=len(arrivals))
    counters = engine.telemetry.counters
    assert counters.draft_tokens > 20
    assert (counters.failed_passes, counters.failed_drafters) == (0, 0)
    if right:  # a grammar makes its own guesses, which come true in any case
        assert counters.accepted_tokens > 20


# ---------------------------------------------------------------------- threads


@pytest.mark.parametrize("subject", ["bf16:gemma3-tiny", "int8-bf16:llama-tiny"], indirect=True)
def test_two_threads_compute_the_bits_of_one(subject: Subject) -> None:
    arrivals = [Arrival(i // 2, prompt_of(subject, 40 * i + 1, seed=i), greedy(12)) for i in range(6)]
    for arrival in arrivals:
        subject.alone(arrival.prompt, arrival.params)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check(subject, Variant("phase7_chunked", {"prefill_chunk_size": 40}), arrivals)
    finally:
        torch.set_num_threads(before)
