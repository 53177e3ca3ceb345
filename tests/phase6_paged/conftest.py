"""These tests run on phase 6, and on phase 7 without chunks."""

from __future__ import annotations

import pytest

from tests.support.engines import Variant


@pytest.fixture(
    params=[Variant("phase6_paged"), Variant("phase7_chunked", {"use_chunked_prefill": False})], ids=str
)
def variant(request: pytest.FixtureRequest) -> Variant:
    chosen: Variant = request.param
    return chosen
