"""Gated activations of the MLP (Shazeer, 2020, "GLU Variants Improve Transformer").

    gated_act(gate, up) = activation(gate) * up

With SiLU this is SwiGLU (Llama, Qwen), with the tanh form of GELU it is GeGLU (Gemma). Gate and up come out
of one fused matrix multiplication, side by side in each row. The kernel reads both halves of a row and writes
their product, while eager torch also writes the activation to memory and reads it back.
"""

import torch
import torch.nn.functional as F

from kernels.dispatch import HAS_TRITON, device_guard, use_native, use_triton
from kernels.overlap import early_launch

if HAS_TRITON:
    import triton
    import triton.language as tl

    from kernels.overlap import wait_for_inputs

ACTIVATIONS = ("silu", "gelu_tanh")


def gated_act(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Apply `activation` to the gates and multiply the results by the ups.

    Args:
        gate_up: [T, 2F] float32, bfloat16 or float16: the first F columns are the gates, the last F the ups.
            The last dimension is contiguous, rows may be any distance apart.
        activation: "silu" (SwiGLU) or "gelu_tanh" (GeGLU with the tanh approximation of GELU).

    Returns:
        [T, F], contiguous, dtype of `gate_up`. In half precision the torch path rounds twice, after the
        activation and after the product, as Hugging Face models do; the kernels round once. The two may
        differ in the last bit.

    Raises:
        ValueError: unknown activation, or an odd number of columns.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}: choose one of {', '.join(ACTIVATIONS)}")
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up must have an even number of columns, but is {list(gate_up.shape)}")
    if use_triton(gate_up):
        return gated_act_triton(gate_up, activation)
    if use_native(gate_up):
        return gated_act_native(gate_up, activation)
    return gated_act_reference(gate_up, activation)


# --- torch ---------------------------------------------------------------------------------------------


def gated_act_reference(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Compute `gated_act` in torch, with the same arguments and result."""
    gate, up = gate_up.chunk(2, dim=-1)
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    # In place on the fresh activation: one allocation less.
    return activated.mul_(up)


# --- C++ -----------------------------------------------------------------------------------------------


def gated_act_native(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Compute `gated_act` by the kernel in `gated_act.cpp`, with the same arguments and result."""
    if gate_up.stride(-1) != 1:
        gate_up = gate_up.contiguous()
    out: torch.Tensor = torch.ops.infer.gated_act(gate_up, activation == "silu")
    return out


# --- Triton --------------------------------------------------------------------------------------------

if HAS_TRITON:

    @triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
    def gate_up_product(gate, up, activation: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton has no types
        """Return `activation(gate) * up`, all float32."""
        # gelu_tanh(x) = x/2 * (1 + tanh(z)) with z = sqrt(2/pi) * (x + 0.044715 x^3), and
        # (1 + tanh(z)) / 2 = sigmoid(2z): so this too is a gate times a sigmoid, and needs no tanh.
        steepened = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        openness = tl.sigmoid(gate if activation == "silu" else steepened)
        return gate * openness * up

    @triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
    def _gated_act_kernel(  # type: ignore[no-untyped-def]  # Triton has no types
        gate_up_ptr,
        out_ptr,
        row_stride,
        size,
        activation: tl.constexpr,
        tile: tl.constexpr,
        early: tl.constexpr,
    ):
        """Program (t, i) computes columns i * tile, … of row t. `size` is F."""
        wait_for_inputs(early)
        # 64-bit, because row * stride passes 2^31 in a long prefill.
        row = tl.program_id(0).to(tl.int64)
        columns = tl.program_id(1) * tile + tl.arange(0, tile)
        mask = columns < size
        source = gate_up_ptr + row * row_stride + columns
        gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(source + size, mask=mask, other=0.0).to(tl.float32)
        out = gate_up_product(gate, up, activation)
        tl.store(out_ptr + row * size + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


def gated_act_triton(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Compute `gated_act` by the Triton kernel, with the same arguments and result."""
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out  # no rows, nothing to launch
    if gate_up.stride(-1) != 1:
        gate_up = gate_up.contiguous()
    tile = min(1024, triton.next_power_of_2(size))
    with device_guard(gate_up):
        _gated_act_kernel[(tokens, triton.cdiv(size, tile))](
            gate_up,
            out,
            gate_up.stride(0),
            size,
            activation=activation,
            tile=tile,
            num_warps=4,
            **early_launch(gate_up.device),
            enable_fp_fusion=False,  # or `kernels.few_rows_linear` could round differently
        )
    return out
