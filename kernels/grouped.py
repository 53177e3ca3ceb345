"""Linear layers on weights in groups: four to eight bits for a weight, and a scale for every few inputs.

```text
W[n, k]  =  scale[n, g] * q[n, k] - min[n, g]                                    g: the group of input k

y[n]     =  sum over groups of  scale[n, g] * (sum of x[k] q[n, k])  -  min[n, g] * (sum of x[k])
```

The quantized weights of GGUF files (llama.cpp's format) are such weights. They are not rounded again: a group's
sum is taken with the integers, and then its scale multiplies the sum. The sum of a group's inputs is the same for
all outputs.

**One form of panels for all kinds of groups.** A panel has 32 outputs. Inputs come in blocks of 32. Of an output, a
block has as many 32-bit words as a weight has bits. Words of neighbouring outputs lie side by side, as vector
instructions read them:

```text
unit       scales of 32 outputs: float16;  mins of 32 outputs, if there are mins
  block    word 0 of outputs 0 to 15, word 1 of outputs 0 to 15, …;  the words of outputs 16 to 31
           codes of 32 outputs: int8;  codes of their mins
  block    …
unit       …
```

A unit is one group, of one or more blocks; or each of its blocks has one or two groups. In the second case, a
group's scale is its unit's scale times an int8 of its own, its *code*, and a min likewise. (The product has more
digits than a float16. So it is not stored.)

**Words.** A weight of 8 bits is a byte: word `w` has inputs 4w to 4w + 3. Of narrower weights, words 0 to 3 have
the lowest four bits:

```text
bits      0–3     4–7      8–11    12–15   | 16–19   20–23    24–27   28–31
word w    4w      4w + 16  4w + 2  4w + 18 | 4w + 1  4w + 17  4w + 3  4w + 19       inputs
```

Each further word has one bit of every weight. Bit 4w + i of its lower half belongs to the weight whose lowest bits
are number i of the lower half of word w. The upper halves belong together likewise.

A product of bfloat16 numbers adds two neighbouring inputs at once. In the two halves of a word, two neighbouring
inputs have the same place. So one shift moves these inputs of 16 outputs to where an instruction looks up the
numbers that their bits stand for.

`kernels/native/grouped.cpp` computes the products. The reference turns panels back into float32 matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.dispatch import has_native_products, use_native
from kernels.gated_act import gated_act

OUTPUTS = 32  # of a panel
INPUTS = 32  # of a block
LANES = 16  # outputs of a vector register
BLOCK_WEIGHTS = 2**22  # weights that the reference holds in float32 at a time: 16 MB


class Form(NamedTuple):
    """How a matrix is stored.

    Attributes:
        bits: of a weight: 4, 5, 6 or 8.
        blocks: of a unit.
        groups: of a block, each with a code; 0: a unit is one group, without a code.
        mins: whether there are mins. Then q is 0 or more. Else q has a sign, and is stored with 2^(bits - 1) added.
            With 8 bits, q is an int8 in both cases.
    """

    bits: int
    blocks: int = 1
    groups: int = 0
    mins: bool = False

    @property
    def unit_bytes(self) -> int:
        factors = 1 + self.mins
        return OUTPUTS * (2 * factors + self.blocks * (4 * self.bits + self.groups * factors))

    def num_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of a matrix [outputs, inputs] in panels."""
        return -(-outputs // OUTPUTS) * inputs // (INPUTS * self.blocks) * self.unit_bytes


class Groups(NamedTuple):
    """Rows of a matrix [N, K].

    Attributes:
        values: [N, K] uint8, or int8 in forms of 8 bits: q as it is stored.
        scales, mins: [N, units] float16. `mins` is None in forms without mins.
        codes, min_codes: [N, groups of K] int8; None in forms without codes.
    """

    values: Tensor
    scales: Tensor
    mins: Tensor | None = None
    codes: Tensor | None = None
    min_codes: Tensor | None = None


@dataclass(frozen=True)
class Layout:
    """The matrices of one layer, which have the same inputs. Their panels lie one after the other in memory.

    Attributes:
        inputs: K.
        sizes: the outputs of each matrix.
        forms: the form of each matrix.
        table: for the C++ kernels, int64 [panels, 7]: a panel's first byte, its first output, the number of its
            outputs, and the four numbers of its form.
    """

    inputs: int
    sizes: tuple[int, ...]
    forms: tuple[Form, ...]
    table: Tensor

    @classmethod
    def of(cls, inputs: int, sizes: Sequence[int], forms: Sequence[Form]) -> Layout:
        table, byte, first = [], 0, 0
        for size, form in zip(sizes, forms, strict=True):
            for output in range(0, size, OUTPUTS):
                count = min(OUTPUTS, size - output)
                table.append([byte, first + output, count, *map(int, form)])
                byte += form.num_bytes(count, inputs)
            first += size
        return cls(inputs, tuple(sizes), tuple(forms), torch.tensor(table, dtype=torch.int64, device="cpu"))

    def room(self) -> nn.Parameter:
        """Return a parameter for the panels, on the meta device."""
        return nn.Parameter(
            torch.empty(sum(self.byte_counts), dtype=torch.uint8, device="meta"), requires_grad=False
        )

    @property
    def byte_counts(self) -> list[int]:
        """The bytes of each matrix."""
        return [form.num_bytes(size, self.inputs) for size, form in zip(self.sizes, self.forms, strict=True)]


# ---------------------------------------------------------------------- panels


class _Fields(NamedTuple):
    """Views of what panels hold. `P` panels have `U` units of `B` blocks with `G` groups each.

    Attributes:
        words: [P, U, B, 2, bits, 16] int32.
        scales, mins: [P, U, 32] float16.
        codes, min_codes: [P, U, B, G, 32] int8.
    """

    words: Tensor
    scales: Tensor
    mins: Tensor | None
    codes: Tensor | None
    min_codes: Tensor | None

    @classmethod
    def of(cls, panels: Tensor, form: Form, inputs: int) -> _Fields:
        """View the bytes of panels: uint8, any shape."""
        units = panels.view(-1, inputs // (INPUTS * form.blocks), form.unit_bytes)
        header = 2 * OUTPUTS * (1 + form.mins)
        places = units.shape[:2]
        factors = units[..., :header].view(torch.float16).view(*places, -1, OUTPUTS).unbind(2)
        blocks = units[..., header:].view(*places, form.blocks, -1)
        end = 4 * OUTPUTS * form.bits
        words = blocks[..., :end].view(torch.int32).view(*places, form.blocks, 2, form.bits, LANES)
        codes: Sequence[Tensor] = ()
        if form.groups:
            own = blocks[..., end:].view(torch.int8)
            codes = own.view(*places, form.blocks, -1, form.groups, OUTPUTS).unbind(3)
        mins, min_codes = (factors[1], codes[1] if codes else None) if form.mins else (None, None)
        return cls(words, factors[0], mins, codes[0] if codes else None, min_codes)


def pack_into(panels: Tensor, groups: Groups, form: Form) -> None:
    """Write rows into panels: uint8, of `num_bytes` of the form. Outputs that are missing in the last are zeros."""
    inputs = groups.values.shape[1]
    fields = _Fields.of(panels, form, inputs)
    missing = -len(groups.values) % OUTPUTS
    units, blocks = fields.words.shape[1:3]

    def by_panel(rows: Tensor) -> Tensor:
        """[N, …] -> [P, 32, …]."""
        whole = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows
        return whole.view(-1, OUTPUTS, *whole.shape[1:])

    if use_native(panels):
        torch.ops.infer.pack_words(groups.values, fields.words)
    else:
        words = by_panel(_words(groups.values.view(-1, inputs // INPUTS, INPUTS), form.bits))
        fields.words.copy_(words.view(-1, 2, LANES, units, blocks, form.bits).permute(0, 3, 4, 1, 5, 2))
    for field, factors in ((fields.scales, groups.scales), (fields.mins, groups.mins)):
        if field is not None and factors is not None:
            field.copy_(by_panel(factors).transpose(1, 2))
    for field, codes in ((fields.codes, groups.codes), (fields.min_codes, groups.min_codes)):
        if field is not None and codes is not None:
            field.copy_(by_panel(codes.view(-1, units, blocks, form.groups)).permute(0, 2, 3, 4, 1))


def unpack(panels: Tensor, form: Form, inputs: int) -> Tensor:
    """Return the weights of panels: uint8 -> [32 P, K] float32. Outputs that are missing in the last are zeros."""
    words, scales, mins, codes, min_codes = _Fields.of(panels, form, inputs)
    rows = words.permute(0, 3, 5, 1, 2, 4).reshape(-1, inputs // INPUTS, form.bits)
    signed = form.bits < 8 and not form.mins
    values = _values(rows, form.bits).float() - (2 ** (form.bits - 1) if signed else 0)

    def of_groups(units: Tensor, codes: Tensor | None) -> Tensor:
        """[P, U, 32] and [P, U, B, G, 32] -> [32 P, groups, 1] float32."""
        found = units.float()[:, :, None, None]
        found = found.expand(-1, -1, form.blocks, -1, -1) if codes is None else found * codes
        return found.permute(0, 4, 1, 2, 3).reshape(len(values), -1, 1)

    scale = of_groups(scales, codes)
    weights = values.view(len(values), scale.shape[1], -1) * scale
    if mins is not None:
        weights -= of_groups(mins, min_codes)
    return weights.view(len(values), inputs)


def _words(values: Tensor, bits: int) -> Tensor:
    """Return the words of blocks: [N, blocks, 32] -> [N, blocks, bits] int32."""
    if bits == 8:
        return values.view(torch.int32)
    low = values & 15
    nibbles = _swap_middle_bytes((low[..., :16] | low[..., 16:] << 4).view(torch.int32))
    further = [_swap_bits(_as_bits((values >> bit) & 1)) for bit in range(4, bits)]
    return torch.cat([nibbles, *further], dim=-1)


def _values(words: Tensor, bits: int) -> Tensor:
    """Return the values of blocks: [N, blocks, bits] int32 -> [N, blocks, 32] uint8, or int8 if bits is 8."""
    if bits == 8:
        return words.view(torch.int8)
    nibbles = _swap_middle_bytes(words[..., :4]).view(torch.uint8)
    values = torch.cat([nibbles & 15, nibbles >> 4], dim=-1)
    for bit in range(4, bits):
        own = _swap_bits(words[..., bit : bit + 1]) >> torch.arange(INPUTS, dtype=torch.int32)
        values |= (own & 1).to(torch.uint8) << bit
    return values


def _as_bits(bytes: Tensor) -> Tensor:
    """Return numbers whose bits are the bytes, all 0 or 1: [..., 32] uint8 -> [..., 1] int32, the lowest bit first.

    The product of eight bytes and the constant has each of them at another place of its highest byte.
    """
    eights = bytes.view(torch.int64) * 0x0102040810204080
    return ((eights >> 56) & 0xFF).to(torch.uint8).view(torch.int32)


def _swap_middle_bytes(words: Tensor) -> Tensor:
    """Swap bytes 1 and 2 of each word, so that odd inputs come into the upper half. Returns a new tensor."""
    return (words & -0xFFFF01) | (words & 0xFF00) << 8 | (words >> 8) & 0xFF00


def _swap_bits(words: Tensor) -> Tensor:
    """Change words from bit `k` for input `k` to the order of a panel, or back. Returns a new tensor.

    An input's place has five binary digits. The order of a panel has the first and the last of them swapped.
    """
    differing = ((words >> 15) ^ words) & 0xAAAA
    return words ^ differing ^ (differing << 15)


# ---------------------------------------------------------------------- products


def grouped_linear(
    x: Tensor, panels: Tensor, layout: Layout, bias: Tensor | None = None, wide: bool = False
) -> Tensor:
    """Compute `y = x W^T (+ b)`: [T, K] -> [T, N], float32 if `wide`, else the type of x.

    Args:
        x: [T, K].
        panels: uint8, the panels of all matrices.
        layout: of the panels.
        bias: [N], the type of x.
        wide: whether the result keeps the float32 sums.
    """
    if has_native_products(x):
        out: Tensor = torch.ops.infer.grouped_linear(x, panels, layout.table, sum(layout.sizes), bias, wide)
        return out
    return grouped_linear_reference(x, panels, layout, bias, wide)


def grouped_linear_reference(
    x: Tensor, panels: Tensor, layout: Layout, bias: Tensor | None = None, wide: bool = False
) -> Tensor:
    """Compute `grouped_linear` in torch, with the same arguments and result."""
    rows = x.float()
    y = torch.cat([F.linear(rows, weights) for weights in _weights(panels, layout)], dim=-1)
    y = y if bias is None else y + bias.float()
    return y if wide else y.to(x.dtype)


def grouped_gated_linear(
    x: Tensor, panels: Tensor, layout: Layout, activation: str, bias: Tensor | None = None
) -> Tensor:
    """Compute `activation(x G^T) * (x U^T)`: [T, K] -> [T, F]. The layout has two matrices, gates G and ups U."""
    if has_native_products(x):
        size, silu = layout.sizes[0], activation == "silu"
        out: Tensor = torch.ops.infer.grouped_gated_linear(x, panels, layout.table, size, bias, silu)
        return out
    return gated_act(grouped_linear_reference(x, panels, layout, bias), activation)


def grouped_rows(rows: Tensor, panels: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """Return rows of a matrix, the only one of its layout: row numbers [T] -> [T, K] of type `dtype`."""
    if has_native_products(panels, dtype):
        out: Tensor = torch.ops.infer.grouped_rows(rows, panels, layout.table, layout.inputs, dtype)
        return out
    form, inputs = layout.forms[0], layout.inputs
    all_panels = panels.view(-1, form.num_bytes(OUTPUTS, inputs))
    found = torch.empty(len(rows), inputs, dtype=dtype, device=panels.device)
    step = max(1, BLOCK_WEIGHTS // (OUTPUTS * inputs))  # each row's whole panel is unpacked
    for some, target in zip(torch.split(rows, step), torch.split(found, step), strict=True):
        weights = unpack(all_panels[some // OUTPUTS], form, inputs).view(len(some), OUTPUTS, inputs)
        target.copy_(weights[torch.arange(len(some)), some % OUTPUTS])
    return found


def _weights(panels: Tensor, layout: Layout) -> Iterator[Tensor]:
    """Yield the weights of all matrices in float32, at most `BLOCK_WEIGHTS` or one panel at a time: [N', K]."""
    inputs, begin = layout.inputs, 0
    step = max(1, BLOCK_WEIGHTS // (OUTPUTS * inputs)) * OUTPUTS
    for size, form in zip(layout.sizes, layout.forms, strict=True):
        for first in range(0, size, step):
            count = min(step, size - first)
            end = begin + form.num_bytes(count, inputs)
            yield unpack(panels[begin:end], form, inputs)[:count]
            begin = end
