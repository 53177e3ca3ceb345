"""Random histories of a whole engine, on both backends and with little memory; and 24 requests on less and less."""

from __future__ import annotations

from typing import Any

import pytest

import tests.phase6_paged.test_memory_pressure as pressure
from common.models.layers import CausalLM
from common.request import RequestState
from tests.engine_helpers import RememberingModel, build, continuation, solo, tiny_model
from tests.phase6_paged.support import PagedTraffic, assert_streams
from tests.traffic import Traffic, assert_everything_happened, random_traffic, state_machine


class ChunkedTraffic(PagedTraffic):
    """What the cache holds of a prompt is what it has advanced."""

    def check(self) -> None:
        super().check()
        assert_progress(self)


class ContiguousTraffic(Traffic):
    def check(self) -> None:
        super().check()
        assert_progress(self)


def assert_progress(traffic: Traffic) -> None:
    pool = traffic.engine.runner.pool
    for request in traffic.live.values():
        if request.state is RequestState.PREFILL:
            assert request.slot is not None
            assert pool.get_seq_len(request.slot) == request.prefill_progress < len(request.token_ids)
            assert pool.capacity(request.slot) >= len(request.token_ids), "reserved whole at admission"
        elif request.state is RequestState.WAITING:
            assert request.prefill_progress == 0


TIGHT: dict[str, Any] = {"block_size": 4, "num_blocks": 10, "prefill_chunk_size": 3}

TestChunkedTraffic = state_machine("phase7_chunked", 40, 50, ChunkedTraffic, **TIGHT)


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize(("budget", "chunks"), [(3, None), (6, None), (None, None), (None, 2)])
def test_random_operations_in_a_tight_pool(budget: int | None, chunks: int | None, mixed: bool) -> None:
    traffic = random_traffic(
        "phase7_chunked",
        4000,
        1,
        ChunkedTraffic,
        prefill_token_budget=budget,
        max_prefill_chunks_per_step=chunks,
        mixed_batches=mixed,
        **TIGHT,
    )
    assert_everything_happened(traffic)
    assert traffic.engine.scheduler.preemptions > 10


def test_10000_random_operations_with_chunks_of_one() -> None:
    traffic = random_traffic(
        "phase7_chunked", 10_000, 2, ChunkedTraffic, prefill_chunk_size=1, block_size=1, num_blocks=44
    )
    assert_everything_happened(traffic)


@pytest.mark.parametrize("chunk", [1, 5, 512])
def test_random_operations_on_the_contiguous_backend(chunk: int) -> None:
    traffic = random_traffic(
        "phase7_chunked",
        3000,
        3,
        ContiguousTraffic,
        kv_cache_backend="contiguous",
        prefill_chunk_size=chunk,
    )
    assert_everything_happened(traffic)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_many_random_operations(seed: int) -> None:
    assert_everything_happened(random_traffic("phase7_chunked", 20_000, seed, ChunkedTraffic, **TIGHT))


# ---------------------------------------------------------------------- memory pressure


@pytest.fixture(scope="module")
def llama() -> CausalLM:
    return tiny_model()


@pytest.fixture(scope="module")
def alone(llama: CausalLM) -> list[list[int]]:
    return [solo(llama, order.prompt, order.params) for order in pressure.orders()]


@pytest.mark.parametrize("blocks", [pressure.AMPLE, 60, 25, pressure.SMALLEST])
@pytest.mark.parametrize("mixed", [True, False])
def test_the_same_tokens_at_every_size(
    blocks: int, mixed: bool, llama: CausalLM, alone: list[list[int]]
) -> None:
    options = pressure.options(blocks) | {"prefill_chunk_size": 4, "mixed_batches": mixed}
    engine = build("phase7_chunked", llama, prefill_token_budget=8, **options)
    requests, outputs, steps = pressure.serve(engine)
    pressure.report("phase 7", blocks, engine, steps)
    assert_streams(outputs, {r.request_id: t for r, t in zip(requests, alone, strict=True)})
    assert (engine.scheduler.preemptions > 0) == (blocks <= 60)


def test_every_size_from_ample_to_the_smallest() -> None:
    """With a model that only remembers: many sizes, chunk sizes and caps."""
    for blocks in [*range(pressure.SMALLEST, 60, 2), pressure.AMPLE]:
        engine = build(
            "phase7_chunked",
            RememberingModel(),
            prefill_chunk_size=1 + blocks % 7,
            prefill_token_budget=(1 + blocks % 7, 9, None)[blocks % 3],
            max_prefill_chunks_per_step=(None, 1, 2)[blocks % 3],
            mixed_batches=blocks % 2 == 0,
            **pressure.options(blocks),
        )
        requests, outputs, _ = pressure.serve(engine)
        assert_streams(
            outputs,
            {r.request_id: continuation(r.prompt_token_ids, r.params.max_new_tokens) for r in requests},
        )
