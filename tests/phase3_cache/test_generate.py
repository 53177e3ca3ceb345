"""`generate`: the tokens of each pass, the end of a request, and that its memory is freed."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from common.engine.reference import ContiguousCache, generate
from common.models.layers import CausalLM, TokenBatch
from common.request import Request
from tests.support.engines import greedy

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
def passes(llama: CausalLM) -> Iterator[list[tuple[list[int], list[int]]]]:
    """The token ids and the positions of each pass through the model."""
    seen: list[tuple[list[int], list[int]]] = []

    def note(_: CausalLM, arguments: tuple[TokenBatch, object]) -> None:
        batch = arguments[0]
        seen.append((batch.token_ids.tolist(), batch.positions.tolist()))

    handle = llama.register_forward_pre_hook(note)
    yield seen
    handle.remove()


def test_a_pass_computes_only_tokens_that_the_cache_lacks(
    llama: CausalLM, passes: list[tuple[list[int], list[int]]]
) -> None:
    tokens = [output.token_id for output in generate(llama, Request("r", PROMPT, greedy(4)))]
    assert len(tokens) == 4
    assert passes == [(PROMPT, [0, 1, 2, 3, 4]), *(([token], [5 + i]) for i, token in enumerate(tokens[:3]))]


def test_a_text_ends_at_its_length_or_at_eos(llama: CausalLM) -> None:
    first, second, *_ = (output.token_id for output in generate(llama, Request("r", PROMPT, greedy(4))))
    assert first != second
    assert second is not None
    outputs = list(generate(llama, Request("r", PROMPT, greedy(4), frozenset({second}))))
    assert [output.token_id for output in outputs] == [first, second]
    assert [output.finished for output in outputs] == [False, True]


@pytest.mark.parametrize("tokens", [1, 3])
def test_memory_is_freed_at_the_end_and_when_the_reader_stops(
    tokens: int, llama: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[int] = []
    monkeypatch.setattr(ContiguousCache, "_free", lambda _, slot: freed.append(slot))
    answer = generate(llama, Request("r", PROMPT, greedy(3)))
    for _ in range(tokens):
        next(answer)
    assert isinstance(answer, Generator)
    answer.close()
    assert freed == [0]


def test_a_request_past_the_positions_of_the_model_is_a_value_error(llama: CausalLM) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the message is free, for learners
        next(generate(llama, Request("r", PROMPT, greedy(llama.max_positions))))
