"""Computes texts as `what_is_new` says, in pieces of many sizes, and compares the logits with those of one pass."""

from __future__ import annotations

import pytest
import torch
from what_is_new import what_is_new

from common.generate import ContiguousCache
from common.kv import KVShape, Span
from common.models.layers import CausalLM, TokenBatch
from common.models.registry import load_model, open_checkpoint
from common.request import Request, SamplingParams

TEXT = [5, 17, 90, 44, 8, 120, 33, 61, 2, 75]


@pytest.fixture(scope="module")
def model() -> CausalLM:
    checkpoint = open_checkpoint("zoo:llama-tiny")
    return load_model(checkpoint, device=torch.device("cpu"), dtype=torch.float32, max_positions=16)


def logits_of(model: CausalLM, most: int) -> torch.Tensor:
    cache = ContiguousCache(KVShape.of(model.config, model.dtype), model.device, len(TEXT))
    cache.reserve(Request("text", TEXT, SamplingParams()), len(TEXT))
    for _ in TEXT:
        held = cache.get_seq_len(0)
        token_ids, positions, row = what_is_new(TEXT, held, most)
        assert len(positions) == len(token_ids)
        view = cache.view([Span.exact(0, held, held + len(token_ids))])
        rows = torch.tensor([0 if row is None else row])
        logits = model(TokenBatch(torch.tensor(token_ids), torch.tensor(positions), rows), view)
        view.advance()
        if row is not None:
            return logits
    raise AssertionError("no pass ever reached the text's last token")


@pytest.mark.parametrize("most", [1, 2, 3, 9, 10, 100])
def test_pieces_of_any_size_give_the_logits_of_the_whole(model: CausalLM, most: int) -> None:
    cache = ContiguousCache(KVShape.of(model.config, model.dtype), model.device, len(TEXT))
    cache.reserve(Request("text", TEXT, SamplingParams()), len(TEXT))
    view = cache.view([Span.exact(0, 0, len(TEXT))])
    last = torch.tensor([len(TEXT) - 1])
    expected = model(TokenBatch(torch.tensor(TEXT), view.positions, last), view)
    assert torch.allclose(logits_of(model, most), expected, atol=1e-4)
