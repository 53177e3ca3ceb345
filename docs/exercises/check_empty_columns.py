"""Runs phase 5 with a short request in a long slot, and asks `empty_share` on the way."""

from __future__ import annotations

import pytest
from empty_columns import empty_share

from common.llm import LLM
from common.request import SamplingParams


def test_a_short_request_in_a_long_slot() -> None:
    engine = LLM("zoo:llama-tiny", phase="continuous", dtype="float32", max_seq_len=100).engine
    assert empty_share(engine.runner.pool) == 0.0
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    assert engine.add_request(engine.create_request([5] * 10, params))
    engine.step()  # the prompt: 10 columns of 100 hold a token
    assert empty_share(engine.runner.pool) == pytest.approx(0.90)
    engine.step()  # the first generated token is stored when the second is computed
    assert empty_share(engine.runner.pool) == pytest.approx(0.89)
    while engine.has_work:
        engine.step()
    assert empty_share(engine.runner.pool) == 0.0
