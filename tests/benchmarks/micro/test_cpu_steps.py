"""The stages from torch's operations to native kernels: which kernels are native, and that all give the same."""

from __future__ import annotations

import pytest
import torch

from benchmarks.micro.cpu_steps import STAGES, measure, only
from benchmarks.micro.passes import PROMPT, Passes
from common.models.layers import CausalLM
from kernels import native
from tests.support.engines import Operators
from tests.support.models import load, zoo

pytestmark = pytest.mark.skipif(
    not native.is_loaded() or not native.has_products(torch.float32), reason="no native kernels here"
)


def model(*, packed: bool) -> CausalLM:
    loaded = load(zoo("llama-tiny"), max_positions=PROMPT)
    if packed:
        loaded.pack()
    return loaded


def test_a_stage_has_the_kernels_of_those_before_and_its_own() -> None:
    seen, logits, chosen = [], [], list[str]()
    for _, modules in STAGES:
        chosen += modules
        passes = Passes(model(packed="linear" in chosen), [2])
        with only(chosen), Operators() as operators:
            logits.append(passes.plain(*passes.decode(2))())
        called = {name.partition("::") for name, _ in operators.calls}
        seen.append({name for owner, _, name in called if owner == "infer"})
    assert seen == [
        set(),
        {"linear", "gated_linear"},
        {"linear", "gated_linear", "attention"},
        {"linear", "gated_linear", "attention", "rms_norm", "fused_add_rms_norm", "rope"} & seen[-1],
    ]
    assert seen[-1] >= {"fused_add_rms_norm", "rope"}
    for each in logits[1:]:
        torch.testing.assert_close(each, logits[0], rtol=1e-3, atol=1e-3)
    (played,) = passes.taped(*passes.decode(2))()
    assert torch.equal(played, logits[-1])


def test_a_row_for_each_stage_and_a_time_for_each_pass() -> None:
    rows = measure("zoo:llama-tiny", [1, 3], 1, torch.float32)
    assert [row[0] for row in rows] == [*(stage for stage, _ in STAGES), "played from a tape"]
    assert all(isinstance(cell, float) and cell > 0 for row in rows for cell in row[1:])
