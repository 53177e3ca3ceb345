"""All that holds for phase 5 holds for phase 6 with slots, too."""

from __future__ import annotations

import pytest

from tests.engine_helpers import Variant


@pytest.fixture(
    params=[Variant("phase5_continuous"), Variant("phase6_paged", {"kv_cache_backend": "contiguous"})],
    ids=str,
)
def variant(request: pytest.FixtureRequest) -> Variant:
    chosen: Variant = request.param
    return chosen
