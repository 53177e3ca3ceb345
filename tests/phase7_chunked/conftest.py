"""All that holds for phase 7 holds for phase 8 without its prefix cache, too."""

from __future__ import annotations

import pytest

from tests.engine_helpers import Variant


@pytest.fixture(
    params=[Variant("phase7_chunked"), Variant("phase8_prefix", {"enable_prefix_caching": False})], ids=str
)
def variant(request: pytest.FixtureRequest) -> Variant:
    chosen: Variant = request.param
    return chosen
