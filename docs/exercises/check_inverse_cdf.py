"""Draws with `draw` and with the server's sampler, token for token."""

from __future__ import annotations

import pytest
import torch
from inverse_cdf import draw

from common.request import Request, SamplingParams
from common.sampling import sample

VOCAB, DRAWS = 50, 40


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [None, 1, 5])
def test_the_same_number_gives_the_same_token(temperature: float, top_k: int | None) -> None:
    logits = torch.randn(DRAWS, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    logits[:, 7] = logits[:, 3]  # equals
    requests = [
        Request(f"r{i}", [0], SamplingParams(temperature=temperature, top_k=top_k, seed=i))
        for i in range(DRAWS)
    ]
    expected = sample(logits, requests).token_ids.tolist()
    found = [
        draw(row, request.next_uniform(), temperature, top_k)
        for row, request in zip(logits.tolist(), requests, strict=True)
    ]
    assert found == expected
