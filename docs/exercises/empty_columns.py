"""Exercise: how much of the reserved KV memory holds nothing?

Write `empty_share`, then run `.venv/bin/pytest docs/exercises/empty_columns.py`.
The check runs phase 5 with a short request in a long slot, and calls `empty_share` between steps.
"""

from __future__ import annotations

import pytest

from common.kv import KVPool
from common.llm import LLM
from common.request import SamplingParams


def empty_share(pool: KVPool) -> float:
    """Return the share of the reserved columns that hold no token, from 0.0 to 1.0; 0.0 if none is reserved.

    A column is the memory for one token's key and value.
    """
    raise NotImplementedError("a pool says both numbers")


# ---------------------------------------------------------------------- the check


def test_a_short_request_in_a_long_slot() -> None:
    engine = LLM("zoo:llama-tiny", phase="continuous", dtype="float32", max_seq_len=100).engine
    assert empty_share(engine.runner.pool) == 0.0
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    assert engine.add_request(engine.maker.create([5] * 10, params))
    engine.step()  # the prompt: 10 columns of 100 hold a token
    assert empty_share(engine.runner.pool) == pytest.approx(0.90)
    engine.step()  # the first generated token is stored when the second is computed
    assert empty_share(engine.runner.pool) == pytest.approx(0.89)
    while engine.has_work:
        engine.step()
    assert empty_share(engine.runner.pool) == 0.0


# ---------------------------------------------------------------------- one way to solve it


def solution(pool: KVPool) -> float:
    """The pool counts its used tokens and its reserved tokens."""
    return 1 - pool.used_tokens / pool.reserved_tokens if pool.reserved_tokens else 0.0
