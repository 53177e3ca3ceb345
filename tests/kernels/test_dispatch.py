"""The path that a public function takes. Torch paths can be compiled, and need no Triton."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import kernels.gated_act
import kernels.rms_norm
import kernels.rope

ROOT = Path(__file__).parents[2]
X = torch.linspace(-2, 2, 3 * 8).view(3, 8)
HEADS = torch.linspace(-2, 2, 3 * 2 * 8).view(3, 2, 8)
ANGLES = torch.linspace(0, 3, 5 * 4).view(5, 4)
POSITIONS = torch.tensor([4, 0, 2])

CALLS: dict[str, tuple[ModuleType, tuple]] = {
    "rms_norm": (kernels.rms_norm, (X, torch.ones(8), 1e-6, 1.0)),
    "fused_add_rms_norm": (kernels.rms_norm, (X, X, torch.ones(8), 1e-6, 0.0)),
    "rope": (kernels.rope, (HEADS, HEADS[:, :1], ANGLES.cos(), ANGLES.sin(), POSITIONS)),
    "gated_act": (kernels.gated_act, (X, "silu")),
}


@pytest.mark.parametrize("name", CALLS)
def test_use_triton_decides_the_path(monkeypatch, name):
    module, arguments = CALLS[name]
    for path in ("reference", "triton"):
        monkeypatch.setattr(module, f"{name}_{path}", lambda *given, path=path: (path, given))
    for chosen in (True, False):
        asked = []
        monkeypatch.setattr(
            module, "use_triton", lambda tensor, asked=asked, chosen=chosen: asked.append(tensor) or chosen
        )
        monkeypatch.setattr(module, "use_native", lambda tensor: False, raising=False)
        path, given = getattr(module, name)(*arguments)
        assert (path, given) == ("triton" if chosen else "reference", arguments)
        assert asked[0] is arguments[0]


@pytest.mark.slow
def test_modules_work_without_triton():
    """Without Triton, as on a Mac, every module can be imported and computes with torch."""
    script = """
import sys
sys.modules["triton"] = None  # any import of it now fails
import torch
from kernels import dispatch, gated_act, rms_norm, rope
from kernels.attention import attention
from kernels.attention_layout import AttentionLayout
from kernels.paged_attention import paged_attention_reference
assert not dispatch.HAS_TRITON
x = torch.ones(2, 8)
assert torch.allclose(rms_norm.rms_norm(x, torch.ones(8), 0.0), x)
normed, residual = rms_norm.fused_add_rms_norm(x, x, torch.ones(8), 0.0)
assert torch.allclose(residual, 2 * x) and torch.allclose(normed, x)
heads, none, all_ = x.view(2, 1, 8), torch.zeros(2, 4), torch.ones(2, 4)
assert torch.equal(rope.rope(heads, heads, all_, none)[0], heads)
assert gated_act.gated_act(x, "silu").shape == (2, 4)
store, table, new = torch.ones(2, 4, 1, 8), torch.tensor([[1]]), torch.ones(1, 1, 8)
layout = AttentionLayout(table, torch.arange(1), 4, (1,), (3,), 1)
out = attention(torch.ones(1, 2, 8), new, new, store, store, layout, scale=1.0, window=None)
assert torch.allclose(out, torch.ones(1, 2, 8))
reference = paged_attention_reference(out, store, store, layout.paged(8), scale=1.0, window=None)
assert torch.equal(reference, out)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
