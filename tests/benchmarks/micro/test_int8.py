"""int8 beside bfloat16: rows and columns of the tables, and how two models are compared."""

from __future__ import annotations

import pytest
import torch

from benchmarks.micro import int8
from kernels import native
from tests.support.models import draw_ids, solo_logits

pytestmark = pytest.mark.skipif(
    not native.is_loaded() or not native.has_products(torch.bfloat16), reason="no native kernels here"
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "READ_BYTES", 2**20)


def test_two_models_are_compared_as_their_logits_say() -> None:
    models = int8.load_both("zoo:llama-tiny", 300)
    ids = draw_ids(290, 500)
    one, other = int8.compare(list(models.values()), ids)
    first, second = (solo_logits(model, ids)[:-1].double().log_softmax(dim=-1) for model in models.values())
    picked = first[torch.arange(289), torch.tensor(ids[1:])]
    assert one.perplexity == pytest.approx((-picked.mean()).exp().item(), rel=1e-3)
    expected = (first.exp() * (first - second)).sum(dim=-1)
    assert other.divergences == pytest.approx(expected.tolist(), rel=1e-3, abs=1e-6)
    assert min(other.divergences) >= 0 < max(other.divergences)
    assert other.same == pytest.approx(
        (first.argmax(-1) == second.argmax(-1)).double().mean().item(), abs=0.01
    )


def test_a_change_has_its_standard_error_over_the_texts() -> None:
    (table,) = int8.accuracy(models=("zoo:llama-tiny",), tokens=60, texts=3)
    ((name, whole, half, change, error, *_),) = table.rows
    assert name == "zoo:llama-tiny"
    assert change == pytest.approx(100 * (half / whole - 1))
    assert error > 0
    (single,) = int8.accuracy(models=("zoo:llama-tiny",), tokens=60, texts=1)
    assert single.rows[0][4] is None
