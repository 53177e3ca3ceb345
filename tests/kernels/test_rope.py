"""RoPE in every implementation, against rotations of complex numbers in float64."""

import numpy as np
import pytest
import torch

import kernels.rope
from tests.kernels.support import DTYPES, FP32, HEAD_SIZES

TABLE_ROWS = 500


def make_table(head_dim: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of the standard frequencies, [TABLE_ROWS, D/2]."""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(TABLE_ROWS).double()[:, None] * frequencies
    return angles.cos().float().to(device), angles.sin().float().to(device)


def make_heads(
    tokens: int, heads_q: int, heads_kv: int, head_dim: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q and k as views of one fused QKV matrix, and positions in random order, as in a mixed batch."""
    generator = torch.Generator().manual_seed(tokens + 7 * heads_q + head_dim)
    fused = torch.randn(tokens, (heads_q + 2 * heads_kv) * head_dim, generator=generator).to(device, dtype)
    q, k, _ = fused.split([heads_q * head_dim, heads_kv * head_dim, heads_kv * head_dim], dim=1)
    positions = torch.randint(0, TABLE_ROWS, (tokens,), generator=generator).to(device)
    return q.view(tokens, heads_q, head_dim), k.view(tokens, heads_kv, head_dim), positions


def oracle(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs as complex numbers, each by one complex multiplication, in float64."""
    values = x.double().cpu().numpy()
    half = values.shape[-1] // 2
    numbers = values[..., :half] + 1j * values[..., half:]
    turned = numbers * (cos.double().cpu().numpy() + 1j * sin.double().cpu().numpy())[:, None, :]
    return torch.from_numpy(np.concatenate((turned.real, turned.imag), axis=-1)).to(x.device)


def rotate(way, *arguments):
    return way.of(kernels.rope, "rope")(*arguments)


@pytest.mark.parametrize(
    ("head_dim", "form", "dtype"),
    [
        *((size, "shared table", FP32) for size in HEAD_SIZES),
        *((80, "shared table", dtype) for dtype in DTYPES[1:]),
        *((128, "per row", dtype) for dtype in DTYPES[:2]),
    ],
    ids=str,
)
def test_pairs_are_turned(way, dtype, form, head_dim):
    cos, sin = make_table(head_dim, way.device)
    for tokens, *heads in ((0, 3, 1), (1, 1, 1), (1, 9, 3), (3, 3, 3), (3, 9, 3), (17, 3, 1)):
        q, k, positions = make_heads(tokens, *heads, head_dim, dtype, way.device)
        before = q.clone(), k.clone()
        own = cos[positions], sin[positions]
        arguments = (cos, sin, positions) if form == "shared table" else (*own, None)
        for x, turned, was in zip((q, k), rotate(way, q, k, *arguments), before, strict=True):
            assert turned.dtype == dtype
            assert way.name == "reference" or turned.is_contiguous()
            way.assert_rounded(turned, oracle(x, *own))
            assert torch.equal(x, was)


def test_a_token_does_not_depend_on_its_neighbours(way):
    """Rows in one call, each at its own position, equal each row alone. Both forms of angles agree."""
    q, k, positions = make_heads(6, 3, 1, 64, FP32, way.device)
    assert len(set(positions.tolist())) == 6
    cos, sin = make_table(64, way.device)
    together = rotate(way, q, k, cos, sin, positions)
    per_row = rotate(way, q, k, cos[positions], sin[positions], None)
    for token in range(6):
        row = slice(token, token + 1)
        alone = rotate(way, q[row], k[row], cos, sin, positions[row])
        for i in range(2):
            assert torch.equal(together[i][row], alone[i])
            assert torch.equal(together[i], per_row[i])


def test_strides_are_followed(way):
    """Inputs have heads before tokens, gaps between columns and positions, and tables cut from wider ones."""
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(3, 5, 64, generator=generator).to(way.device).transpose(0, 1)
    k = torch.randn(5, 1, 128, generator=generator).to(way.device)[:, :, ::2]
    positions = torch.tensor([9, 1, 0, 2, 499, 3, 17, 4, 17, 5], device=way.device)[::2]
    cos, sin = (torch.cat((x, x), dim=1)[:, 32:] for x in make_table(64, way.device))
    for x, turned in zip((q, k), rotate(way, q, k, cos, sin, positions), strict=True):
        assert turned.stride(-1) == 1
        way.assert_rounded(turned, oracle(x, cos[positions], sin[positions]))
