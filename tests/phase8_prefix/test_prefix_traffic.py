"""Random histories of an engine whose prompts begin alike, with little memory; and 24 requests on less and less."""

from __future__ import annotations

from typing import Any

import pytest

import tests.phase6_paged.test_memory_pressure as pressure
from tests.engine_helpers import RememberingModel, build, continuation
from tests.phase6_paged.support import assert_streams
from tests.phase8_prefix.support import assert_shared_consistently, caching
from tests.traffic import Traffic, assert_everything_happened, random_traffic, state_machine


class SharingTraffic(Traffic):
    """Prompts are a token of their own and then all the same, so those with the same first token share."""

    def check(self) -> None:
        super().check()
        assert_shared_consistently(caching(self.engine))


TIGHT: dict[str, Any] = {"block_size": 4, "num_blocks": 12, "prefill_chunk_size": 3}

TestSharingTraffic = state_machine("phase8_prefix", 40, 50, SharingTraffic, **TIGHT)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mixed_batches": False},
        {"prefill_token_budget": None},
        {"block_size": 1, "num_blocks": 44, "prefill_chunk_size": 1},
    ],
    ids=str,
)
def test_random_operations_in_a_tight_pool(options: dict[str, Any]) -> None:
    traffic = random_traffic("phase8_prefix", 4000, 1, SharingTraffic, **(TIGHT | options))
    assert_everything_happened(traffic)
    counters = traffic.engine.telemetry.counters
    assert min(counters.preemptions, counters.evictions) > 5
    assert counters.cached_tokens > counters.prompt_tokens / 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_many_random_operations(seed: int) -> None:
    assert_everything_happened(random_traffic("phase8_prefix", 20_000, seed, SharingTraffic, **TIGHT))


def test_every_size_from_ample_to_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressure, "assert_consistent", lambda pool: assert_shared_consistently(caching(pool)))
    for blocks in [*range(pressure.SMALLEST, 60, 3), pressure.AMPLE]:
        engine = build(
            "phase8_prefix",
            RememberingModel(),
            prefill_chunk_size=1 + blocks % 7,
            prefill_token_budget=(1 + blocks % 7, 9, None)[blocks % 3],
            mixed_batches=blocks % 2 == 0,
            **pressure.options(blocks),
        )
        requests, outputs, _ = pressure.serve(engine)
        assert_streams(
            outputs,
            {r.request_id: continuation(r.prompt_token_ids, r.params.max_new_tokens) for r in requests},
        )
