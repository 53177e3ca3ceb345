"""Random traffic on an engine with little memory and a file below it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.phase11_tiered.support import reading_pays, stop
from tests.support.traffic import Traffic, assert_everything_happened, random_traffic


@pytest.mark.parametrize("depth", [2, 0])
@pytest.mark.slow
def test_random_traffic_with_little_memory(tmp_path: Path, depth: int) -> None:
    options = {"block_size": 4, "num_blocks": 12, "prefill_chunk_size": 3, "pipeline_depth": depth}
    traffic = Traffic("phase11_tiered", kv_tier=tmp_path, kv_tier_bytes=2**20, **options)
    reading_pays(traffic.engine)
    random_traffic(traffic, 2000, seed=1)
    assert_everything_happened(traffic)
    counters = traffic.engine.telemetry.counters
    assert counters.tier_hits > 50
    assert counters.evictions > 5
    stop(traffic.engine)
