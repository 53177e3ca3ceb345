"""These tests run on phase 5, and on phase 6 with slots."""

from __future__ import annotations

import pytest

from tests.support.engines import Variant


@pytest.fixture(
    params=[Variant("phase5_continuous"), Variant("phase6_paged", {"kv_cache_backend": "contiguous"})],
    ids=str,
)
def variant(request: pytest.FixtureRequest) -> Variant:
    chosen: Variant = request.param
    return chosen
