"""Worked examples of pages: their numbers are those of the server's own model, sampler, cache and estimates."""

from __future__ import annotations

import itertools
from collections import Counter
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
from docs.building import by_hand, capacity, filters, gaps, spellings, worked
from tests.docs.support import ROOT

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


# ---------------------------------------------------------------------- chats that come back as text


def test_an_odd_run_of_tokens_decodes_to_a_text_with_other_ids() -> None:
    text = spellings.tokenizer().decode(spellings.odd_ids())
    again = spellings.encode(text)
    assert again != spellings.odd_ids()
    assert spellings.tokenizer().decode(again) == text


def test_a_chat_computes_an_answers_tail_once_if_it_comes_back_as_text() -> None:
    first, second, third = spellings.chat()
    assert first.text_hits == first.ids_hits == 0
    block = spellings.BLOCK
    prompt = len(spellings.encode(f"{spellings.SYSTEM}\n{spellings.TURNS[0][0]}"))
    odd = prompt + len(spellings.encode(spellings.TURNS[0][1].partition("crourite")[0])) + 1
    assert second.text_hits == odd // block * block < second.ids_hits, "up to the odd word"
    assert third.text_hits == second.text_tokens // block * block < third.ids_hits, "all of the turn before"


def test_the_grammar_forces_what_the_page_says() -> None:
    runs = spellings.forced_runs()
    answer = [i for run in runs for i in (*([] if run.sampled is None else [run.sampled]), *run.forced)]
    assert answer == spellings.encode(spellings.JSON)
    assert spellings.FORCED_TEXT in [spellings.tokenizer().decode(run.forced) for run in runs]


@pytest.mark.parametrize(("text", "ways"), [("a", 1), ("an", 2), ("", 1)])
def test_spellings_are_counted(text: str, ways: int) -> None:
    assert spellings.spellings(text) == ways


# ---------------------------------------------------------------------- filters


def test_pieces_of_the_interval_are_as_the_page_says() -> None:
    numbers = [place / 200 for place in range(200)]
    plain, cold, three = (filters.drawn(filters.COUNTED[name], numbers) for name in filters.PICTURED)
    for tokens in (plain, cold, three):
        assert len(list(itertools.groupby(tokens))) == len(set(tokens)), "a token has one piece"
    [(first, _), *others] = Counter(plain).most_common(3)
    assert cold.count(first) > plain.count(first), "a lower temperature makes a long piece longer"
    assert set(three) == {first, *(token for token, _ in others)}, "top-k keeps the longest pieces"


# ---------------------------------------------------------------------- capacity


@pytest.mark.parametrize("context", capacity.CONTEXTS)
def test_one_more_sequence_would_not_fit(context: int) -> None:
    most = capacity.most_sequences(context)
    assert capacity.estimate(most, context).total <= capacity.MEMORY
    assert capacity.estimate(most + 1, context).total > capacity.MEMORY


def test_the_pages_command_has_the_numbers_of_its_tables() -> None:
    text = (ROOT / "docs" / "capacity.md").read_text(encoding="utf-8")
    half = capacity.ANSWER
    assert half * 2 == capacity.CONTEXT
    users = capacity.most_sequences(capacity.CONTEXT)
    assert (
        f"--workload {half}+{half} --requests {users} --slots {users} --option 9:max-batch-size={users}"
        in text
    )


# ---------------------------------------------------------------------- gaps


def test_tokens_come_in_pairs_where_the_page_says_so() -> None:
    tiny, larger = ({each.label: each for each in gaps.gaps_of(model)} for model in gaps.MODELS)
    assert tiny[gaps.AFTER].together > 0.5 > tiny[gaps.BEFORE].together
    assert larger[gaps.AFTER].together < 0.05
    assert "measured" in gaps.gaps_fact("verdict")
