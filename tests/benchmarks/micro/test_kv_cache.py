"""The KV cache: both ways give the same answer and are timed."""

from __future__ import annotations

import torch

from benchmarks.micro.kv_cache import Text
from benchmarks.micro.passes import load_as_served


def test_both_ways_give_the_same_answer() -> None:
    model = load_as_served("zoo:llama-tiny", torch.float32, 64)
    kept, again = Text(model, 10), Text(model, 10)
    token_ids = [5, 17, 90, 44]
    for start in (0, *range(4, 9)):
        token = kept.next_token(token_ids, start)
        assert token == again.next_token(token_ids, 0)
        token_ids.append(token)
