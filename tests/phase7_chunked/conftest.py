"""These tests run on phase 7, and on phase 8 without its prefix cache."""

from __future__ import annotations

import pytest

from tests.support.engines import Variant


@pytest.fixture(
    params=[Variant("phase7_chunked"), Variant("phase8_prefix", {"enable_prefix_caching": False})], ids=str
)
def variant(request: pytest.FixtureRequest) -> Variant:
    chosen: Variant = request.param
    return chosen
