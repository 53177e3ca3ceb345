"""A share that asks for the logits of several rows: guessed tokens are verified in one pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.engine import Engine
from common.kv import Span
from common.request import Request, SamplingParams
from common.runner import ForwardPass, PassShare
from common.sampling import SamplingInputs
from phase5_continuous import Runner
from tests.engine_helpers import add, assert_all_free, build, greedy, run, solo, tiny_model, tokens_of

PROMPT = [5, 9, 2, 7]


class FortuneTeller(Runner):
    """Knows the answers, and decodes two tokens of them at a time."""

    answers: dict[str, list[int]]

    def decode_share(self, request: Request) -> PassShare:
        share = super().decode_share(request)
        told = request.num_generated_tokens
        guess = self.answers[request.request_id][told : told + 1]
        if not guess or told + 1 >= request.params.max_new_tokens:
            return share
        span = Span.exact(share.span.slot, share.span.start, share.span.start + 2)
        return PassShare(request, span, [*share.token_ids, *guess], range(2))


def telling(model: Any, **options: Any) -> Engine:
    engine = build("phase5_continuous", model, **options)
    runner = engine.runner
    engine.runner = FortuneTeller(runner.config, runner.model, runner.pool, runner.telemetry)
    engine.runner.answers = {}
    return engine


@pytest.mark.parametrize(
    "params",
    [
        greedy(9, ignore_eos=True),
        SamplingParams(max_new_tokens=9, seed=3, ignore_eos=True),
        SamplingParams(max_new_tokens=8, seed=4, top_p=0.9, top_k=40, ignore_eos=True),
    ],
    ids=["greedy", "drawn", "drawn from the likeliest"],
)
def test_two_tokens_a_pass_are_those_of_one_a_pass(params: SamplingParams) -> None:
    model = tiny_model()
    engine = telling(model)
    prompts = [PROMPT, [8, 1], [3] * 7]
    answers = [solo(model, prompt, params) for prompt in prompts]
    requests = [add(engine, prompt, params) for prompt in prompts]
    assert isinstance(engine.runner, FortuneTeller)
    for request, answer in zip(requests, answers, strict=True):
        engine.runner.answers[request.request_id] = answer
    outputs = run(engine)
    for request, answer in zip(requests, answers, strict=True):
        assert tokens_of(outputs, request) == answer
    assert engine.telemetry.counters.steps <= 2 + len(answers[0]) // 2 + 1, "two tokens a step"
    assert_all_free(engine)


def test_an_end_within_a_pass_drops_the_tokens_behind_it() -> None:
    model = tiny_model()
    answer = solo(model, PROMPT, greedy(8, ignore_eos=True))
    place = next(i for i in range(1, 7, 2) if answer[i] not in answer[:i])
    params = greedy(8, ignore_eos=True, stop_token_ids=(answer[place],))
    engine = telling(model)
    request = add(engine, PROMPT, params)
    assert isinstance(engine.runner, FortuneTeller)
    engine.runner.answers[request.request_id] = answer
    outputs = run(engine)
    assert tokens_of(outputs, request) == answer[: place + 1]
    assert sum(output.finished for output in outputs) == 1
    assert_all_free(engine)


def test_rows_are_counted_over_all_shares_of_a_pass() -> None:
    first, second, third = (Request(name, [1, 2, 3], SamplingParams()) for name in "abc")
    shares = (
        PassShare(first, Span.exact(0, 4, 5), [9], range(1)),
        PassShare(second, Span.exact(1, 0, 3), [1, 2, 3], range(0)),
        PassShare(third, Span.exact(2, 5, 8), [7, 8, 9], range(1, 3)),
    )
    assert ForwardPass(shares).sampled_rows() == ((first, third, third), [0, 5, 6])


def test_a_request_draws_a_number_of_its_own_in_each_row() -> None:
    request, other = (Request(name, [1], SamplingParams(seed=i)) for i, name in enumerate("ab"))
    inputs = SamplingInputs.of((request, request, request, other), None, 16, torch.device("cpu"))
    assert inputs.settings is not None
    drawn = inputs.settings[:, -1].tolist()
    assert drawn == [*map(request.next_uniform, range(3)), other.next_uniform()]
    assert len(set(drawn)) == 4
