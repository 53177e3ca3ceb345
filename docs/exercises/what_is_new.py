"""Exercise: which tokens a pass computes, at which positions, and which row's logits choose the next token.

Write `what_is_new`, then run `.venv/bin/pytest docs/exercises/what_is_new.py`.
The check computes a text in pieces of many sizes and compares the logits with those of one pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from common.engine.reference import ContiguousCache
from common.kv import Span
from common.models.layers import CausalLM, TokenBatch
from common.models.registry import load_model, open_checkpoint
from common.request import Request, SamplingParams


def what_is_new(token_ids: Sequence[int], held: int, most: int) -> tuple[list[int], list[int], int | None]:
    """Return what the next pass over a text computes.

    Args:
        token_ids: the text so far.
        held: how many of the text's first tokens are in the cache. At least one token is not.
        most: the largest number of tokens that a pass may compute.

    Returns:
        The tokens that the pass computes; their positions; and the index, among these tokens, of the token whose
        logits choose the next token (None if the pass does not reach the text's last token).
    """
    raise NotImplementedError("three slices")


# ---------------------------------------------------------------------- the check

TEXT = [5, 17, 90, 44, 8, 120, 33, 61, 2, 75]


@pytest.fixture(scope="module")
def model() -> CausalLM:
    checkpoint = open_checkpoint("zoo:llama-tiny")
    return load_model(checkpoint, device=torch.device("cpu"), dtype=torch.float32, max_positions=16)


def logits_of(model: CausalLM, most: int) -> torch.Tensor:
    cache = ContiguousCache(model.config.kv_shape(model.dtype), model.device, len(TEXT))
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
    cache = ContiguousCache(model.config.kv_shape(model.dtype), model.device, len(TEXT))
    cache.reserve(Request("text", TEXT, SamplingParams()), len(TEXT))
    view = cache.view([Span.exact(0, 0, len(TEXT))])
    last = torch.tensor([len(TEXT) - 1])
    expected = model(TokenBatch(torch.tensor(TEXT), view.positions, last), view)
    assert torch.allclose(logits_of(model, most), expected, atol=1e-4)


# ---------------------------------------------------------------------- one way to solve it


def solution(token_ids: Sequence[int], held: int, most: int) -> tuple[list[int], list[int], int | None]:
    """For decoding, `most` is 1. For a prompt without chunks, there is no limit. The same lines compute both."""
    end = min(held + most, len(token_ids))
    row = end - held - 1 if end == len(token_ids) else None
    return list(token_ids[held:end]), list(range(held, end)), row
