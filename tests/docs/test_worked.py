"""The worked example of phases 1 to 3: its numbers are those of the server's own model, sampler and cache."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from common.engine.reference import ContiguousCache
from common.kv import Span
from common.models.layers import CausalLM, TokenBatch
from common.models.llama import Llama
from common.models.loader import checkpoint_tensors
from common.models.registry import parse_config
from common.request import Request, SamplingParams
from common.sampling.draw import sample
from docs.building import by_hand, worked

SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": len(by_hand.WORDS),
    "hidden_size": 2,
    "intermediate_size": 1,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "rms_norm_eps": by_hand.EPSILON,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
}
WEIGHTS = {
    "model.embed_tokens.weight": by_hand.EMBEDDING,
    "model.layers.0.input_layernorm.weight": (1.0, 1.0),
    "model.layers.0.self_attn.q_proj.weight": by_hand.W_Q,
    "model.layers.0.self_attn.k_proj.weight": by_hand.W_K,
    "model.layers.0.self_attn.v_proj.weight": by_hand.W_V,
    "model.layers.0.self_attn.o_proj.weight": by_hand.W_O,
    "model.layers.0.post_attention_layernorm.weight": (1.0, 1.0),
    "model.layers.0.mlp.gate_proj.weight": by_hand.W_GATE,
    "model.layers.0.mlp.up_proj.weight": by_hand.W_UP,
    "model.layers.0.mlp.down_proj.weight": by_hand.W_DOWN,
    "model.norm.weight": (1.0, 1.0),
    "lm_head.weight": by_hand.HEAD,
}


@pytest.fixture
def model() -> CausalLM:
    """The server's own model, with the weights of the worked example."""
    built = Llama(parse_config(SHAPE), torch.float32, 16)
    for table in built.rotary:
        table.fill()
    places = checkpoint_tensors(built)
    assert places.keys() == WEIGHTS.keys()
    for name, place in places.items():
        place.copy_(torch.tensor(WEIGHTS[name]))
    return built


def logits_of(model: CausalLM, pieces: list[list[int]]) -> torch.Tensor:
    """Compute a text in pieces, with a cache. Returns the logits of each piece's last token."""
    cache = ContiguousCache(model.config.kv_shape(model.dtype), model.device, 16)
    cache.reserve(Request("text", [0], SamplingParams()), 16)
    found, start = [], 0
    for piece in pieces:
        view = cache.view([Span.exact(0, start, start + len(piece))])
        batch = TokenBatch(torch.tensor(piece), view.positions, torch.tensor([len(piece) - 1]))
        found.append(model(batch, view)[0])
        view.advance()
        start += len(piece)
    return torch.stack(found)


@pytest.mark.parametrize("pieces", [[[0, 1, 2]], [[0, 1], [2]], [[0], [1], [2]]])
def test_by_hand_and_by_the_servers_model_a_text_has_the_same_logits(
    model: CausalLM, pieces: list[list[int]]
) -> None:
    ends = list(itertools.accumulate(map(len, pieces)))
    expected = torch.tensor([by_hand.computed((0, 1, 2))[end - 1].logits for end in ends])
    torch.testing.assert_close(logits_of(model, pieces), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", worked.TEMPERATURES)
def test_a_number_chooses_the_same_token_by_hand_and_by_the_server(temperature: float) -> None:
    logits = by_hand.computed(by_hand.TEXT)[-1].logits
    params = [SamplingParams(temperature=temperature, seed=seed) for seed in range(40)]
    requests = [Request(f"r{each.seed}", [0], each) for each in params]
    expected = sample(torch.tensor([logits] * len(requests)), requests).token_ids.tolist()
    numbers = [request.next_uniform() for request in requests]
    assert [worked.chosen_by(u, logits, temperature) for u in numbers] == expected
    assert len(set(expected)) > 1
