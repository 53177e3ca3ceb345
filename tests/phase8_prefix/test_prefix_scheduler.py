"""Where prefill begins, the memory that admission charges, and the hits that clients see."""

from __future__ import annotations

from typing import Any

import pytest

from common.engine.engine import Engine
from common.engine.requests import Handling
from common.request import Request, RequestState, StepOutput
from tests.support.engines import add, assert_all_free, assert_answered, build, greedy, run
from tests.support.pools import assert_consistent, caching

SYSTEM = list(range(100, 124))  # six blocks of 4


def engine_of(num_blocks: int = 100, **options: Any) -> Engine:
    return build(
        "phase8_prefix", **{"block_size": 4, "num_blocks": num_blocks, "prefill_chunk_size": 8} | options
    )


def own(number: int, length: int = 5) -> list[int]:
    return [*SYSTEM, *[number] * length]


# ---------------------------------------------------------------------- where prefill begins


@pytest.mark.parametrize(
    ("length", "found"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (24, 20), (25, 24), (60, 24)]
)
def test_at_least_the_last_token_is_computed(length: int, found: int) -> None:
    """Even if the whole prompt is cached, the block of its last token is no hit."""
    engine = engine_of()
    first = add(engine, SYSTEM, greedy(1))
    outputs = run(engine)
    second = add(engine, [*SYSTEM, *range(36)][:length], greedy(3))
    computed = engine.telemetry.counters.prefill_tokens
    outputs += run(engine)
    assert second.cached_tokens == found
    assert engine.telemetry.counters.prefill_tokens - computed == length - found
    assert_answered(outputs, [first, second])
    assert_all_free(engine)


def test_a_second_turn_begins_after_the_first_ones_answer() -> None:
    engine = engine_of()
    first = add(engine, own(1), greedy(10))
    outputs = run(engine)
    second = add(engine, [*first.token_ids, 5, 6, 7], greedy(4))
    outputs += run(engine)
    assert second.cached_tokens == (29 + 9) // 4 * 4, "all full blocks, but the last token is in no column"
    assert_answered(outputs, [first, second])


def test_requests_that_arrive_together_look_for_hits_again_when_they_begin() -> None:
    engine = engine_of(max_batch_size=4)
    requests = [add(engine, own(i, 8), greedy(3)) for i in range(4)]
    outputs = engine.step()
    pool = caching(engine)
    assert [r.prefill_progress for r in requests] == [8, 0, 0, 0]
    assert pool.allocator.num_allocated == 4 * 8, "each has reserved all it needs"
    outputs += [output for _ in range(3) for output in engine.step()]
    assert [r.prefill_progress for r in requests] == [32, 0, 0, 0], "whoever is not next has not looked"
    outputs += engine.step()
    assert [r.prefill_progress for r in requests] == [33, 32, 0, 0], "the next one began after 24 hits"
    assert pool.allocator.num_allocated == 4 * 8 + 1 - 6, "what it had reserved for them is free again"
    outputs += run(engine)
    assert [r.cached_tokens for r in requests] == [0, 24, 24, 24]
    assert engine.telemetry.counters.prefill_tokens == 32 + 3 * 8
    assert_answered(outputs, requests)
    assert_all_free(engine)
    assert_consistent(pool)


# ---------------------------------------------------------------------- salts


def test_only_the_same_salt_shares() -> None:
    engine = engine_of()
    found = []
    for salt in ("", "", "a", "a", "b"):
        request = engine.maker.create(SYSTEM, greedy(1), handling=Handling(cache_salt=salt))
        assert engine.add_request(request)
        assert_answered(run(engine), [request])
        found.append(request.cached_tokens)
    assert found == [0, 20, 0, 20, 0]


# ---------------------------------------------------------------------- admission


def active_beside(engine: Engine, prompt: list[int]) -> Request:
    """Add a request, and step until it decodes."""
    holder = add(engine, prompt, greedy(20))
    while holder.state is not RequestState.DECODE:
        engine.step()
    return holder


def test_a_tree_full_of_pinned_blocks_gives_nothing_away() -> None:
    """Running requests use all blocks. New requests wait, decoding ones preempt, and all are answered at last."""
    engine = engine_of(11, max_batch_size=4, prefill_token_budget=None)
    pool = caching(engine)
    requests = [add(engine, [i + 1] * 13, greedy(12)) for i in range(4)]
    outputs: list[StepOutput] = []
    pinned = 0
    while engine.has_work:
        outputs += engine.step()
        assert_consistent(pool)
        pinned += pool.allocator.num_free == 0
    assert pinned > 0
    assert engine.scheduler.preemptions > 0
    assert_answered(outputs, requests)
    assert_all_free(engine)


def test_a_preempted_request_finds_its_own_blocks_which_count_as_no_hits() -> None:
    engine = engine_of(14, prefill_chunk_size=64)
    requests = [add(engine, [i + 1] * 12, greedy(20)) for i in range(2)]
    outputs: list[StepOutput] = []
    while engine.scheduler.preemptions == 0:
        outputs += engine.step()
    victim = requests[1]
    assert victim.num_generated_tokens > 0
    before = engine.telemetry.counters.prefill_tokens
    outputs += run(engine)
    assert victim.prefill_start > 0, "it began after what was left of its own blocks"
    assert engine.telemetry.counters.prefill_tokens - before < victim.num_prompt_tokens
    assert (victim.cached_tokens, engine.telemetry.counters.cached_tokens) == (0, 0)
    assert_answered(outputs, requests)


# ---------------------------------------------------------------------- outputs and telemetry


def test_telemetry_has_the_hit_rate_and_the_steps_have_the_hits() -> None:
    engine = engine_of(12)
    for number in range(3):
        add(engine, own(number), greedy(1))
        run(engine)
    add(engine, [9] * 40, greedy(1))
    run(engine)
    snapshot = engine.telemetry.snapshot()
    counters = snapshot["counters"]
    assert (counters["prompt_tokens"], counters["cached_tokens"]) == (3 * 29 + 40, 48)
    assert counters["evictions"] > 0
    hits = [(s["prompt_tokens"], s["cached_tokens"]) for s in snapshot["steps"] if s["prompt_tokens"]]
    assert hits == [(29, 0), (29, 24), (29, 24), (40, 0)]


def test_a_reset_frees_the_unused_cached_blocks() -> None:
    engine = engine_of()
    add(engine, [5] * 20, greedy(1))
    run(engine)
    holder = active_beside(engine, SYSTEM)
    assert engine.runner.pool.reset_prefix_cache() == 5
    assert engine.runner.pool.counts() == {"evictions": 0}, "nobody needed them"
    cold, warm = add(engine, [5] * 20, greedy(1)), add(engine, own(1), greedy(1))
    assert_answered(run(engine), [cold, warm])
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 24)
    assert holder.is_terminal
    assert_consistent(caching(engine))
