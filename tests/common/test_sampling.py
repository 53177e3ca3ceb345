"""The batched sampler compared with an oracle: the same steps row by row, in Python floats."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import common.sampling.draw
from common.request import Request, SamplingParams
from common.sampling.draw import choose, read_logprobs, sample
from common.sampling.inputs import SamplingInputs, TokenMasks
from kernels import NOT_A_TOKEN, native
from kernels.dispatch import HAS_TRITON
from kernels.tape import record

VOCAB = 40


def make(
    params: SamplingParams | None = None,
    *,
    prompt: Sequence[int] = (0,),
    generated: Sequence[int] = (),
    ends: Sequence[int] = (),
    **values: Any,
) -> Request:
    request = Request("r", list(prompt), params or SamplingParams(**values), frozenset(ends))
    request.token_ids += generated
    return request


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0, spread: float = 3.0) -> Tensor:
    return spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def ids_of(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    return sample(logits, requests).token_ids.tolist()


# ---------------------------------------------------------------------- the oracle


def softmax(scores: Sequence[float]) -> list[float]:
    """Return the softmax of scores. If some are infinite, they share the whole probability."""
    top = max(scores)
    weights = [1.0 if score == top else math.exp(score - top) for score in scores]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def distribution(
    logits: Sequence[float], request: Request, allowed: Collection[int] = range(VOCAB)
) -> list[tuple[int, float]]:
    """Return (token, probability) pairs in the order of the running sum. Empty: no token can be sampled.

    The order of filters is the documented one: biases, penalties, tokens not allowed now, temperature, top-k,
    top-p, min-p.
    """
    params = request.params
    scores = list(logits)
    for token, bias in params.logit_bias:
        scores[token] += bias
    for token in set(request.token_ids):
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token, count in Counter(request.token_ids[request.num_prompt_tokens :]).items():
        scores[token] -= params.frequency_penalty * count + params.presence_penalty
    if request.num_generated_tokens < params.min_tokens:
        for token in request.ending_token_ids:
            scores[token] = -math.inf
    broken = any(map(math.isnan, scores))  # NaN of a token that is not allowed counts, too
    scores = [score if token in allowed else -math.inf for token, score in enumerate(scores)]
    if broken or max(scores) == -math.inf:
        return []
    if params.temperature == 0.0:
        return [(max(range(len(scores)), key=scores.__getitem__), 1.0)]
    scores = [score / params.temperature for score in scores]
    order = list(range(len(scores)))
    if params.top_k is not None or params.top_p < 1.0:
        order.sort(key=lambda token: -scores[token])
    order = order[: params.top_k]
    probabilities = softmax([scores[token] for token in order])
    if params.top_p < 1.0:
        kept, before = 0, 0.0
        while kept < len(order) and (kept == 0 or before < params.top_p):
            before += probabilities[kept]
            kept += 1
        order = order[:kept]
        probabilities = softmax([scores[token] for token in order])
    floor = params.min_p * max(probabilities)
    pairs = [(token, p) for token, p in zip(order, probabilities, strict=True) if p >= floor and p > 0.0]
    total = math.fsum(p for _, p in pairs)
    return [(token, p / total) for token, p in pairs]


def plain_sample(
    logits: Sequence[float], request: Request, uniform: float, allowed: Collection[int] = range(VOCAB)
) -> tuple[int, float]:
    """Return the token, and the distance of `uniform` from the nearest number that gives another token."""
    reached = 0.0
    pairs = distribution(logits, request, allowed)
    for token, p in pairs:
        if reached + p > uniform:
            return token, min(uniform - reached, reached + p - uniform)
        reached += p
    return (pairs[-1][0], 0.0) if pairs else (NOT_A_TOKEN, 1.0)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.0, 2.5, 1e38, 1e300]),
    # No value is n/3, n/10 or n/40: among equally likely tokens, rounding would decide the cut there.
    top_p=st.sampled_from([1.0, 1.0, 0.94, 0.61, 0.11, 1e-6, 5e-324]),
    top_k=st.sampled_from([None, None, 1, 3, 10, VOCAB, 1000]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.8, -0.4]),
    logit_bias=st.sampled_from([(), (), ((3, 9.0), (11, 4.5), (3, -3.0)), ((2, 60.0),)]),
    min_tokens=st.sampled_from([0, 3]),
    ignore_eos=st.sampled_from([False, False, True]),
    stop_token_ids=st.sampled_from([(), (6,)]),
    seed=st.integers(0, 10_000),
    logprobs=st.sampled_from([None, 0, 5]),
)
HISTORY = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8)
ENDLESS = st.sampled_from([math.inf, -math.inf, math.nan])


def masks_of(allowed: dict[int, Collection[int]], words: int = 2) -> TokenMasks:
    """Return masks from the allowed tokens of each row."""
    bits = [sum(1 << token for token in tokens) for tokens in allowed.values()]
    rows = [[each >> 32 * word & 0xFFFFFFFF for word in range(words)] for each in bits]
    return TokenMasks(tuple(allowed), torch.tensor(rows, dtype=torch.int64).to(torch.int32))


Rows = list[tuple[SamplingParams, list[int], list[int], set[int] | None]]
any_batch = given(
    rows=st.lists(
        st.tuples(PARAMS, HISTORY, HISTORY, st.none() | st.none() | st.sets(st.integers(0, VOCAB - 1))),
        min_size=1,
        max_size=6,
    ),
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.5, 3.0, 10.0]),
    endless=st.lists(st.tuples(st.integers(0, 5), HISTORY, ENDLESS), max_size=3),
)


@settings(max_examples=250)
@any_batch
def test_every_row_of_any_batch_against_the_oracle(
    rows: Rows, seed: int, spread: float, endless: list[tuple[int, list[int], float]]
) -> None:
    check_against_the_oracle(rows, seed, spread, endless)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not published for this platform")
@settings(max_examples=3)  # the interpreter is slow
@any_batch
@pytest.mark.slow
def test_a_gpus_kernel_against_the_oracle(
    rows: Rows, seed: int, spread: float, endless: list[tuple[int, list[int], float]]
) -> None:
    """The kernel, which does not sort, runs in Triton's interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common.sampling.draw, "use_triton", lambda _: True)
        check_against_the_oracle(rows, seed, spread, endless)


def asked_for(params: SamplingParams) -> dict[str, object]:
    """Return the parameters that a request names."""
    default = SamplingParams()
    return {
        field.name: value
        for field in dataclasses.fields(params)
        if (value := getattr(params, field.name)) != getattr(default, field.name)
    }


def check_against_the_oracle(
    rows: Rows, seed: int, spread: float, endless: list[tuple[int, list[int], float]]
) -> None:
    """Compare a batch of greedy, sampled, filtered, biased, penalised and masked rows with the oracle."""
    logits = random_logits(len(rows), seed=seed, spread=spread)
    for row, tokens, value in endless:
        logits[row % len(rows), tokens] = value
    requests = [make(params, prompt=p, generated=g[1:], ends=[2, 5]) for params, p, g, _ in rows]
    masks = masks_of({row: tokens for row, (*_, tokens) in enumerate(rows) if tokens is not None})
    sampled = sample(logits, requests, masks if masks.rows else None)
    reported = read_logprobs(sampled, requests)
    unmasked = read_logprobs(sample(logits, requests), requests)
    for row, (request, (*_, tokens)) in enumerate(zip(requests, rows, strict=True)):
        chosen, values = int(sampled.token_ids[row]), logits[row].tolist()
        allowed = range(VOCAB) if tokens is None else tokens
        likely = dict(distribution(values, request, allowed))
        expected, margin = plain_sample(values, request, request.next_uniform(), allowed)
        assert chosen in allowed or chosen == NOT_A_TOKEN == expected
        if request.params.greedy or margin > 1e-5:
            settings_of_row = asked_for(request.params)  # shown if the assertion fails
            assert (chosen, settings_of_row) == (expected, settings_of_row)
        elif likely:
            # Rounding in float32 may move the cut of top-p or min-p by one token, which is no error.
            assert chosen in likely or request.params.top_p < 1.0 or request.params.min_p > 0.0
        entry, plain = reported[row], unmasked[row]
        assert (entry is None) == (plain is None) == (request.params.logprobs is None)
        if entry is not None and plain is not None and not any(map(math.isnan, values)):
            assert entry.top == plain.top, "what the model would have liked"


# ---------------------------------------------------------------------- a few candidates, or all

#: Scores many of which are equal, so that cuts fall between equal scores.
STEPS = st.lists(
    st.sampled_from([0.0, 0.0, 1.0, 1.0, 2.0, 3.5, -4.0, math.inf, -math.inf, math.nan]),
    min_size=VOCAB,
    max_size=VOCAB,
)
FILTERED = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1e-9, 0.3, 1.0, 1.0, 2.5, 1e38]),
    top_p=st.sampled_from([1.0, 0.999999, 0.95, 0.75, 0.5, 0.5, 0.25, 0.1, 1e-9, 5e-324]),
    top_k=st.sampled_from([None, None, 1, 2, 3, 7, 20, VOCAB - 1, VOCAB, 10**12]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 1000),
)


@settings(max_examples=150)
@given(
    rows=st.lists(st.tuples(FILTERED, st.one_of(STEPS, st.integers(0, 1000))), min_size=1, max_size=5),
    candidates=st.integers(1, VOCAB),
)
def test_a_few_candidates_choose_what_all_of_them_choose(
    rows: list[tuple[SamplingParams, list[float] | int]], candidates: int
) -> None:
    """The token never depends on the number of candidates, even with NaN, infinities, or equal scores at the last
    candidate. Scores are drawn from `STEPS` or at random."""
    logits = torch.stack(
        [random_logits(1, seed=each)[0] if isinstance(each, int) else torch.tensor(each) for _, each in rows]
    )
    chosen = []
    for count in (candidates, VOCAB):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(common.sampling.draw, "FIRST_CANDIDATES", count)
            chosen.append(ids_of(logits, [make(params) for params, _ in rows]))
    assert chosen[0] == chosen[1]


class Sorts:
    """Counts the rows that were sorted, by the number of tokens that were sorted in them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: Counter[int] = Counter()
        original = common.sampling.draw._most_likely

        def counting(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
            self.rows[count] += len(scores)
            return original(scores, count)

        monkeypatch.setattr(common.sampling.draw, "_most_likely", counting)


@pytest.mark.parametrize(
    ("values", "last", "sorted_rows"),
    [
        ({"top_k": 2}, 30, 0),
        ({"top_k": 3}, 0, 1),
        ({"top_k": 8}, 5, 1),
        ({"top_p": 0.88}, 30, 0),
        ({"top_p": 0.9}, 4, 1),
    ],
    ids=str,
)
def test_candidates_that_end_among_equals(
    values: dict[str, Any], last: int, sorted_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal tokens rank by their ids, but candidates may be any of them. If that matters, all tokens are sorted."""
    logits = torch.zeros(1, VOCAB)
    logits[0, [30, 20]] = 5.0
    monkeypatch.setattr(common.sampling.draw, "FIRST_CANDIDATES", 8)
    monkeypatch.setattr(Request, "next_uniform", lambda *_: math.nextafter(1.0, 0.0))
    sorts = Sorts(monkeypatch)
    assert ids_of(logits, [make(**values)]) == [last]
    assert sorts.rows[VOCAB] == sorted_rows
    assert ids_of(torch.zeros(1, VOCAB), [make(top_p=1e-9)]) == [0]
    assert sorts.rows[VOCAB] == sorted_rows + 1


# ---------------------------------------------------------------------- seeds and neighbours


def draws(request: Request, logits: Tensor, count: int, neighbours: int = 0, place: int = 0) -> list[int]:
    """Sample `count` tokens of `request`, which is row `place` of a batch with `neighbours` others."""
    chosen = []
    for step in range(count):
        others = [make(seed=1000 * step + i, temperature=1.3, top_k=4 + i) for i in range(neighbours)]
        requests = [*others[:place], request, *others[place:]]
        batch = random_logits(len(requests), seed=step)
        batch[place] = logits[step]
        chosen.append(ids_of(batch, requests)[place])
        request.token_ids.append(chosen[-1])
    return chosen


@pytest.mark.parametrize(
    "values", [{}, {"top_k": 8}, {"top_p": 0.9, "min_p": 0.02}, {"frequency_penalty": 0.5}], ids=str
)
def test_a_seed_gives_the_same_tokens_alone_and_in_any_batch(values: dict[str, Any]) -> None:
    logits = random_logits(30, seed=9)
    alone = draws(make(seed=4, **values), logits, 30)
    assert draws(make(seed=4, **values), logits, 30) == alone
    assert draws(make(seed=4, **values), logits, 30, neighbours=7) == alone
    assert draws(make(seed=4, **values), logits, 30, neighbours=3, place=2) == alone
    assert draws(make(seed=5, **values), logits, 30) != alone


# ---------------------------------------------------------------------- greedy and its limits


def test_greedy_is_exact_and_takes_the_first_of_equals() -> None:
    logits = random_logits(5)
    logits[1, 7] = logits[1, 3] = 100.0
    assert ids_of(logits, [make(temperature=0.0) for _ in range(5)]) == logits.argmax(-1).tolist()
    assert ids_of(logits, [make(temperature=0.0) for _ in range(5)])[1] == 3


def test_a_repetition_penalty_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = random_logits(60, seed=3) + torch.linspace(-20, 20, 60).unsqueeze(1)  # of one sign, and of both
    prompts = [list(range(row % 5, VOCAB, 2)) for row in range(len(logits))]
    for penalty in (0.6, 1.4):
        apply = RepetitionPenaltyLogitsProcessor(penalty)
        theirs = [
            apply(torch.tensor([prompt]), row.unsqueeze(0)).argmax().item()
            for prompt, row in zip(prompts, logits, strict=True)
        ]
        requests = [make(temperature=0.0, repetition_penalty=penalty, prompt=prompt) for prompt in prompts]
        assert ids_of(logits, requests) == theirs


@pytest.mark.parametrize("temperature", [1e-30, 1e-9, 1e-4])
def test_a_tiny_temperature_is_as_good_as_greedy(temperature: float) -> None:
    logits = random_logits(20, spread=30.0)
    requests = [make(temperature=temperature, seed=i, top_k=5 if i % 2 else None) for i in range(20)]
    assert ids_of(logits, requests) == logits.argmax(-1).tolist()


def test_the_numbers_next_to_0_and_1_find_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[:, 3] = logits[:, 9] = 1.0
    for uniform, expected in ((0.0, 3), (math.nextafter(1.0, 0.0), 9)):
        monkeypatch.setattr(Request, "next_uniform", lambda *_, value=uniform: value)
        assert ids_of(logits, [make(), make(top_k=5)]) == [expected, expected]


def test_the_tail_of_a_large_vocabulary_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """200,000 tokens share a probability of 1/10,000. Near 1, float32 sums would skip a hundred of them at once."""
    vocab = 200_001
    logits = torch.zeros(1, vocab)
    logits[0, 0] = math.log(2e9)
    cumulative = list(itertools.accumulate(logits[0].softmax(-1).tolist()))
    for share in (0.1, 0.5, 0.77, 0.999):
        uniform = 1 - (1 - share) * 1e-4
        monkeypatch.setattr(Request, "next_uniform", lambda *_, value=uniform: value)
        (token,) = ids_of(logits, [make()])
        assert abs(token - bisect.bisect_right(cumulative, uniform * cumulative[-1])) <= 1
        assert abs(token - share * vocab) < 0.01 * vocab


def test_a_mask_longer_than_the_vocabulary() -> None:
    """A tokenizer may have more ids than the model."""
    logits = random_logits(2)
    masks = masks_of({1: [VOCAB - 1, VOCAB, 95]}, words=3)
    assert ids_of(logits, [make(temperature=0.0)] * 2)[0] == int(logits[0].argmax())
    assert sample(logits, [make(temperature=0.0)] * 2, masks).token_ids.tolist()[1] == VOCAB - 1


# ---------------------------------------------------------------------- penalties


@pytest.mark.parametrize(
    "values",
    [
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"presence_penalty": -1e300, "frequency_penalty": 1e300},
        {"frequency_penalty": -1e300},
    ],
    ids=str,
)
def test_penalties_beyond_float32_leave_a_token(values: dict[str, Any]) -> None:
    for last in (2.0, math.inf):
        logits = torch.tensor([[0.0, -math.inf, 1.0, -1.0, last]])
        for history in ([0], [1], [2], [3], [4], [0, 1, 2, 3, 4]):
            (token,) = ids_of(logits, [make(prompt=history, generated=history, seed=1, **values)])
            assert token not in (NOT_A_TOKEN, 1)


PENALISED = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 1.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.8, -0.4]),
)


@settings(max_examples=60)
@given(rows=st.lists(st.tuples(PENALISED, HISTORY), min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_counts_that_were_kept_penalise_like_counts_made_anew(
    rows: list[tuple[SamplingParams, list[int]]], seed: int
) -> None:
    """In some of the twenty steps a row is missing, as after a preemption."""
    requests = [make(params, prompt=prompt) for params, prompt in rows]
    for step in range(20):
        away = step % 7 if step % 7 < len(requests) > 1 else None
        present = [request for row, request in enumerate(requests) if row != away]
        logits = random_logits(len(present), seed=seed + step, spread=1.0)
        chosen = ids_of(logits, present)
        anew = [
            make(r.params, prompt=r.prompt_token_ids, generated=r.token_ids[r.num_prompt_tokens :])
            for r in present
        ]
        assert ids_of(logits, anew) == chosen
        for request, token_id in zip(present, chosen, strict=True):
            request.token_ids.append(token_id)


@settings(max_examples=100)
@given(
    rows=st.lists(
        st.tuples(PENALISED, HISTORY, HISTORY, st.integers(0, VOCAB - 1), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 1000),
)
def test_a_token_that_was_not_read_is_penalised_like_one_that_was(
    rows: list[tuple[SamplingParams, list[int], list[int], int, bool]], seed: int
) -> None:
    """Phase 9 samples a token while the one before it is on the device only."""
    logits = random_logits(len(rows), seed=seed, spread=1.0)
    read = [make(params, prompt=prompt, generated=[*made, last]) for params, prompt, made, last, _ in rows]
    requests, unread_ids = [], []
    for params, prompt, made, last, unread in rows:
        request = make(params, prompt=prompt, generated=made if unread else [*made, last])
        request.pending_tokens = int(unread)
        requests.append(request)
        if unread and params.has_penalties:
            unread_ids.append(last)
    inputs = SamplingInputs.of(requests, None, VOCAB, torch.device("cpu"))
    assert (inputs.unread is not None) == bool(unread_ids)
    inputs = inputs._replace(unread_ids=torch.tensor(unread_ids, dtype=torch.int64))
    expected = common.sampling.draw._adjust(logits, SamplingInputs.of(read, None, VOCAB, torch.device("cpu")))
    assert torch.equal(common.sampling.draw._adjust(logits, inputs), expected)


# ---------------------------------------------------------------------- the ends of the numbers

FILTERS: list[dict[str, Any]] = [{}, {"top_k": 30}, {"top_p": 0.99}, {"min_p": 1e-6}]


@pytest.mark.parametrize("values", [*FILTERS, {"presence_penalty": 1.0}], ids=str)
@pytest.mark.parametrize("temperature", [1e-9, 1.0, 1e38])
def test_infinite_logits_share_the_probability(temperature: float, values: dict[str, Any]) -> None:
    logits = random_logits(65)
    alone = ids_of(logits[-1:], [make(seed=64)])
    logits[:-1, [5, 9]] = math.inf
    requests = [make(seed=i, temperature=temperature, logprobs=3, **values) for i in range(64)]
    sampled = sample(logits, [*requests, make(seed=64)])
    *tokens, neighbour = sampled.token_ids.tolist()
    assert tokens == [5 if request.next_uniform() < 0.5 else 9 for request in requests]
    assert [neighbour] == alone
    assert ids_of(logits[:1], [make(temperature=0.0)]) == [5]
    entry = read_logprobs(sampled, [*requests, make()])[0]
    assert entry is not None
    assert [entry.logprob, *(p for _, p in entry.top)] == pytest.approx([math.log(0.5)] * 3 + [-math.inf])


@pytest.mark.parametrize("values", [{"temperature": 0.0}, *FILTERS, {"temperature": 1e38}], ids=str)
def test_nothing_but_minus_infinity_is_no_token_and_harms_nobody(values: dict[str, Any]) -> None:
    logits = random_logits(3)
    expected = ids_of(logits, [make(seed=i, **values) for i in range(3)])
    logits[1] = -math.inf
    requests = [make(seed=i, logprobs=2, **values) for i in range(3)]
    assert sample(logits, requests).token_ids.tolist() == [expected[0], NOT_A_TOKEN, expected[2]]


# ---------------------------------------------------------------------- played from a tape

KINDS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.9},
    {"min_p": 0.1, "top_k": 5, "logprobs": 3},
    {"temperature": 0.0, "presence_penalty": 1.0, "logprobs": 0},
    {"repetition_penalty": 1.3, "logit_bias": ((3, 1.0), (5, -1.0)), "min_tokens": 2},
]


@pytest.mark.skipif(not native.is_loaded(), reason="no native kernels here")
@pytest.mark.parametrize("values", KINDS, ids=str)
def test_a_choice_recorded_for_one_row_holds_for_several(values: dict[str, Any]) -> None:
    """If an operator did nothing for one row, the recorder would refuse."""

    def inputs_of(rows: int) -> tuple[SamplingInputs, dict[str, Tensor]]:
        requests = [make(seed=i, prompt=[i, 3], ends=[7], **values) for i in range(rows)]
        inputs = SamplingInputs.of(requests, None, 2000, torch.device("cpu"))
        return inputs, {name: each for name, each in inputs._asdict().items() if isinstance(each, Tensor)}

    inputs, given = inputs_of(1)
    names = tuple(given)

    def function(logits: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        fields: dict[str, Any] = dict(zip(names, tensors, strict=True))
        sampled = choose(logits, SamplingInputs(**fields, top=inputs.top))
        return tuple(each for each in sampled if each is not None)

    tape, _ = record(function, random_logits(1, 2000), *given.values())
    inputs, given = inputs_of(4)
    logits = random_logits(4, 2000, seed=1)
    assert all(map(torch.equal, tape(logits, *given.values()), function(logits, *given.values())))


# ---------------------------------------------------------------------- logprobs


def test_logprobs_are_the_models_own_before_any_filter() -> None:
    logits = random_logits(4)
    exact = [softmax(row) for row in logits.tolist()]
    requests = [
        make(temperature=0.0, logprobs=3),
        make(seed=1, temperature=2.0, top_k=4, repetition_penalty=1.5, prompt=range(30), logprobs=0),
        make(seed=2),
        make(seed=3, logprobs=20, frequency_penalty=1.0, prompt=range(10), min_tokens=2, ends=[11]),
    ]
    sampled = sample(logits, requests)
    chosen = sampled.token_ids.tolist()
    reported = read_logprobs(sampled, requests)
    assert reported[2] is None
    for row, count in ((0, 3), (1, 0), (3, 20)):
        entry = reported[row]
        assert entry is not None
        assert entry.logprob == pytest.approx(math.log(exact[row][chosen[row]]), abs=1e-4)
        best = sorted(range(VOCAB), key=lambda t: -exact[row][t])[:count]
        assert [token for token, _ in entry.top] == best
        assert [p for _, p in entry.top] == pytest.approx([math.log(exact[row][t]) for t in best], abs=1e-4)
