"""A request that is not done in time is given up, wherever it stands; its neighbours are not."""

from __future__ import annotations

import pytest

from common.errors import RequestTimeoutError
from common.phases import phase_names
from tests.engine_helpers import (
    Clock,
    RememberingModel,
    add,
    assert_all_free,
    build,
    continuation,
    end_of,
    greedy,
    run,
    tokens_of,
)

OPTIONS = {"max_batch_size": 2, "request_timeout": 10.0}


@pytest.mark.parametrize("phase", phase_names())
def test_who_waits_and_who_is_computed(phase: str) -> None:
    clock = Clock()
    engine = build(phase, clock=clock, **OPTIONS, **({"batch_wait_timeout_s": 0.0} if "4" in phase else {}))
    early = [add(engine, [5, 9, i], greedy(60 - 4)) for i in range(3)]  # two compute, one waits
    outputs = [output for _ in range(6) for output in engine.step()]
    clock.advance(4.0)
    late = add(engine, [7, 8], greedy(5))
    outputs += engine.step()
    assert not any(output.finished for output in outputs)
    clock.advance(6.0)
    outputs += run(engine)
    for request in early:
        end = end_of(outputs, request)
        assert isinstance(end.error, RequestTimeoutError)
        assert "10 s" in str(end.error)
        told = tokens_of(outputs, request)
        assert told == continuation(request.prompt_token_ids, len(told))
    assert len(tokens_of(outputs, early[0])) >= 4
    assert end_of(outputs, late).finish_reason == "length"
    assert tokens_of(outputs, late) == continuation(late.prompt_token_ids, 5)
    assert engine.telemetry.counters.requests_failed == 3
    assert_all_free(engine)
    again = add(engine, [5, 9, 1], greedy(6))
    assert tokens_of(run(engine), again) == continuation([5, 9, 1], 6)


def test_in_the_middle_of_a_prompt() -> None:
    clock = Clock()
    engine = build("phase7_chunked", clock=clock, prefill_chunk_size=4, **OPTIONS)
    request = add(engine, list(range(1, 41)), greedy(5))
    engine.step()
    clock.advance(10.0)
    outputs = run(engine)
    assert isinstance(end_of(outputs, request).error, RequestTimeoutError)
    assert_all_free(engine)


def test_no_deadline_is_the_default_and_zero_is_none() -> None:
    clock = Clock()
    engine = build("phase6_paged", clock=clock)
    request = add(engine, [5], greedy(5))
    engine.step()
    clock.advance(1e9)
    assert end_of(run(engine), request).finish_reason == "length"
    with pytest.raises(ValueError, match="request_timeout"):
        build("phase6_paged", request_timeout=0)


def test_a_deadline_is_forgotten_with_its_request() -> None:
    engine = build("phase6_paged", RememberingModel(), **OPTIONS)
    for i in range(20):
        add(engine, [5, i], greedy(2))
        run(engine)
    assert len(engine._deadlines) <= 1
