"""RoPE: the reference against rotations of complex numbers, the Triton kernel against the reference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.rope import rope, rope_reference, rope_triton

DTYPES = [torch.float32, torch.bfloat16]
TABLE_ROWS = 500
BOTH = [rope_reference, rope_triton]


def make_angles(positions: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[T] -> [T, D/2] float64, the standard frequencies."""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return positions.double()[:, None] * frequencies


def make_table(head_dim: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    angles = make_angles(torch.arange(TABLE_ROWS), head_dim)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def make_heads(
    tokens: int, heads_q: int, heads_kv: int, head_dim: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, k) as views of one fused QKV matrix, and positions in no order, as a mixed batch has them."""
    generator = torch.Generator().manual_seed(tokens + 7 * heads_q + head_dim)
    fused = torch.randn(tokens, (heads_q + 2 * heads_kv) * head_dim, generator=generator).to(device, dtype)
    q, k, _ = fused.split([heads_q * head_dim, heads_kv * head_dim, heads_kv * head_dim], dim=1)
    positions = torch.randint(0, TABLE_ROWS, (tokens,), generator=generator).to(device)
    return q.view(tokens, heads_q, head_dim), k.view(tokens, heads_kv, head_dim), positions


def oracle(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """A pair of coordinates is a complex number, and turning it is one complex multiplication. In float64."""
    values = x.double().cpu().numpy()
    half = values.shape[-1] // 2
    numbers = values[..., :half] + 1j * values[..., half:]
    turned = numbers * (cos.double().cpu().numpy() + 1j * sin.double().cpu().numpy())[:, None, :]
    return torch.from_numpy(np.concatenate((turned.real, turned.imag), axis=-1)).to(x.device)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize(("heads_q", "heads_kv"), [(1, 1), (3, 1), (9, 3)])
@pytest.mark.parametrize("head_dim", [2, 64, 80, 96, 128, 256])
def test_reference_turns_pairs(device, dtype, heads_q, heads_kv, head_dim, assert_rounded):
    q, k, positions = make_heads(17, heads_q, heads_kv, head_dim, dtype, device)
    cos, sin = make_table(head_dim, device)
    q_rotated, k_rotated = rope_reference(q, k, cos, sin, positions)
    assert q_rotated.dtype == k_rotated.dtype == dtype
    assert_rounded(q_rotated, oracle(q, cos[positions], sin[positions]))
    assert_rounded(k_rotated, oracle(k, cos[positions], sin[positions]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["shared table", "per row"])
@pytest.mark.parametrize(
    ("tokens", "heads_q", "heads_kv"), [(0, 3, 1), (1, 1, 1), (1, 9, 3), (3, 3, 3), (3, 9, 1), (17, 3, 1)]
)
@pytest.mark.parametrize("head_dim", [2, 64, 80, 96, 128, 256])
def test_kernel_equals_reference(
    triton_device, dtype, form, tokens, heads_q, heads_kv, head_dim, assert_rounded
):
    q, k, positions = make_heads(tokens, heads_q, heads_kv, head_dim, dtype, triton_device)
    cos, sin = make_table(head_dim, triton_device)
    if form == "per row":
        cos, sin, positions = cos[positions], sin[positions], None
    q_before, k_before = q.clone(), k.clone()

    q_rotated, k_rotated = rope_triton(q, k, cos, sin, positions)

    assert q_rotated.dtype == k_rotated.dtype == dtype
    exact_q, exact_k = rope_reference(q.float(), k.float(), cos, sin, positions)
    assert_rounded(q_rotated, exact_q, interpreted=triton_device == "cpu")
    assert_rounded(k_rotated, exact_k, interpreted=triton_device == "cpu")
    assert torch.equal(q, q_before)
    assert torch.equal(k, k_before)


@pytest.mark.parametrize("function", BOTH)
def test_both_forms_of_angles_agree(triton_device, function):
    q, k, positions = make_heads(17, 9, 3, 80, torch.float32, triton_device)
    cos, sin = make_table(80, triton_device)
    shared = function(q, k, cos, sin, positions)
    per_row = function(q, k, cos[positions], sin[positions])
    assert torch.equal(shared[0], per_row[0])
    assert torch.equal(shared[1], per_row[1])


@pytest.mark.parametrize("function", BOTH)
def test_a_token_does_not_depend_on_its_neighbours(triton_device, function):
    """All rows in one call, each at its own position, equal each row alone."""
    q, k, positions = make_heads(6, 3, 1, 64, torch.float32, triton_device)
    assert len(set(positions.tolist())) == 6
    cos, sin = make_table(64, triton_device)
    together_q, together_k = function(q, k, cos, sin, positions)
    for token in range(6):
        row = slice(token, token + 1)
        alone_q, alone_k = function(q[row], k[row], cos, sin, positions[row])
        assert torch.equal(together_q[row], alone_q)
        assert torch.equal(together_k[row], alone_k)


@pytest.mark.parametrize("function", BOTH)
def test_position_zero_changes_nothing(triton_device, function):
    q, k, positions = make_heads(3, 3, 1, 96, torch.bfloat16, triton_device)
    q_rotated, k_rotated = function(q, k, *make_table(96, triton_device), torch.zeros_like(positions))
    assert torch.equal(q_rotated, q)
    assert torch.equal(k_rotated, k)


@pytest.mark.parametrize("function", BOTH)
def test_lengths_are_kept(triton_device, function):
    q, k, positions = make_heads(17, 3, 1, 128, torch.float32, triton_device)
    q_rotated, k_rotated = function(q, k, *make_table(128, triton_device), positions)
    assert not torch.allclose(q_rotated, q)
    torch.testing.assert_close(q_rotated.norm(dim=-1), q.norm(dim=-1))
    torch.testing.assert_close(k_rotated.norm(dim=-1), k.norm(dim=-1))


@settings(max_examples=40, deadline=None)
@given(query=st.integers(0, 200), key=st.integers(0, 200), shift=st.integers(0, 299))
def test_scores_depend_on_distance_alone(query, key, shift):
    """The property RoPE exists for: moving both tokens by the same distance keeps their dot product."""
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 1, 1, 64, generator=generator)
    q, k = q.expand(2, 1, 64), k.expand(2, 1, 64)
    cos, sin = make_table(64)
    queries, _ = rope(q, k, cos, sin, torch.tensor([query, query + shift]))
    _, keys = rope(q, k, cos, sin, torch.tensor([key, key + shift]))
    scores = (queries * keys).sum(dim=(1, 2))
    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=2e-4)


def test_scores_depend_on_distance_at_all():
    q, k, _ = make_heads(50, 1, 1, 64, torch.float32)
    q, k = q[:1].expand(50, 1, 64), k[:1].expand(50, 1, 64)
    queries, keys = rope(q, k, *make_table(64), torch.arange(50))
    scores = (queries[:1] * keys).sum(dim=(1, 2))
    assert scores.std() > 0.5
    assert len({round(score, 3) for score in scores.tolist()}) > 40


@pytest.mark.parametrize("function", BOTH)
def test_strides_are_followed(triton_device, function, assert_rounded):
    """Heads before tokens, gaps between columns and positions, tables cut out of wider ones."""
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(3, 5, 64, generator=generator).to(triton_device).transpose(0, 1)
    k = torch.randn(5, 1, 128, generator=generator).to(triton_device)[:, :, ::2]
    positions = torch.tensor([9, 1, 0, 2, 499, 3, 17, 4, 17, 5], device=triton_device)[::2]
    cos, sin = (torch.cat((x, x), dim=1)[:, 32:] for x in make_table(64, triton_device))
    q_rotated, k_rotated = function(q, k, cos, sin, positions)
    assert q_rotated.stride(-1) == k_rotated.stride(-1) == 1
    assert_rounded(q_rotated, oracle(q, cos[positions], sin[positions]))
    assert_rounded(k_rotated, oracle(k, cos[positions], sin[positions]))


def test_token_offsets_beyond_32_bits(triton_device, assert_rounded):
    """Token 2 of this view starts past element 2^31. Only the pages that are touched take memory on a CPU."""
    stride = 2**30 + 64
    try:
        store = torch.empty(2 * stride + 256, dtype=torch.bfloat16, device=triton_device)
    except RuntimeError:
        pytest.skip("4 GiB of address space are not to be had")
    small_q, small_k, positions = make_heads(3, 3, 1, 64, torch.bfloat16, triton_device)
    q = store.as_strided((3, 3, 64), (stride, 64, 1))
    k = store.as_strided((3, 1, 64), (stride, 64, 1), storage_offset=192)
    q.copy_(small_q)
    k.copy_(small_k)
    table = make_table(64, triton_device)
    for actual, expected in zip(
        rope_triton(q, k, *table, positions), rope_triton(small_q, small_k, *table, positions), strict=True
    ):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.ones(3, 1, 8)}, r"q \[2, 3, 8\] and k \[3, 1, 8\]"),
        ({"k": torch.ones(2, 1, 6)}, r"q \[2, 3, 8\] and k \[2, 1, 6\]"),
        ({"cos": torch.ones(9, 8), "sin": torch.ones(9, 8)}, "half of q's head size 8"),
        ({"sin": torch.ones(1, 4)}, "half of q's head size 8"),
        ({"positions": torch.zeros(1, dtype=torch.int64)}, "positions must have one row"),
        ({"positions": None}, "cos must have one row for each of q's 2 tokens, but has 9"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change, message):
    arguments = {
        "q": torch.ones(2, 3, 8),
        "k": torch.ones(2, 1, 8),
        "cos": torch.ones(9, 4),
        "sin": torch.ones(9, 4),
        "positions": torch.zeros(2, dtype=torch.int64),
    }
    rope(**arguments)
    with pytest.raises(ValueError, match=message):
        rope(**(arguments | change))
