"""The options that may be given together."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.engines import Variant

WITHOUT = {"use_chunked_prefill": False}


@pytest.mark.parametrize(
    ("told", "budget"),
    [({}, 512), ({"prefill_token_budget": 256}, 256), ({"prefill_token_budget": None}, None)],
)
def test_the_budget_is_a_chunk_unless_it_is_told(
    variant: Variant, told: dict[str, Any], budget: int | None
) -> None:
    assert variant.config(prefill_chunk_size=512, **told).prefill_token_budget == budget


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefill_chunk_size", 128),
        ("max_prefill_chunks_per_step", 2),
        ("prefill_token_budget", 512),
        ("prefill_token_budget", None),
        ("mixed_batches", False),
    ],
)
def test_contradictions_refuse_to_start_with_the_reason(variant: Variant, name: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        variant.config(**WITHOUT, **{name: value})
    (error,) = caught.value.errors()
    assert f"{name} has no meaning without use_chunked_prefill: leave one of them out" in error["msg"]
