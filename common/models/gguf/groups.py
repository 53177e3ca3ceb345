"""The quantized types of GGUF files as groups: one table.

A type has blocks of 32 or 256 weights. A block's bytes are its scales and its weights, in the type's own order. The
functions here bring the numbers into the order of `kernels.grouped.Groups`. No number changes.

```text
Q4_0 Q5_0 Q8_0     w = d q           d float16 for 32 weights
Q4_1 Q5_1          w = d q + m       m float16, too
Q4_K Q5_K          w = d s q - e m   d and e float16 for 256 weights, s and m of 6 bits for 32 weights
Q6_K               w = d s q         s of 8 bits, with a sign, for 16 weights
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from common.models.gguf.file import GGUFTensor
from common.models.loader import read_fully
from kernels.dispatch import use_native
from kernels.grouped import INPUTS, OUTPUTS, Form, Groups, pack_into

CHUNK_WEIGHTS = 2**20  # brought into panels at once: some megabytes


class Field(NamedTuple):
    """Bits of a block's weights, in bytes from `offset` on.

    In `run` bytes, the lowest `width` bits belong to as many weights, the next bits to the next weights, and so on.
    Then come the next `run` bytes.
    """

    offset: int
    width: int
    run: int


class Factors(NamedTuple):
    """Scales and mins of rows, as in `Groups`."""

    scales: Tensor
    mins: Tensor | None = None
    codes: Tensor | None = None
    min_codes: Tensor | None = None


class Kind(NamedTuple):
    """A quantized type.

    Attributes:
        form: of its groups.
        factors: takes rows as they are stored, [N, blocks, bytes of a block] uint8, and returns their factors.
        fields: of the weights, their lowest bits first.
    """

    form: Form
    factors: Callable[[Tensor], Factors]
    fields: tuple[Field, ...]

    def read(self, stored: Tensor) -> Groups:
        """Return rows as groups: [N, blocks, bytes of a block] uint8, contiguous."""
        inputs = stored.shape[1] * INPUTS * self.form.blocks
        values = torch.empty(len(stored), inputs, dtype=torch.uint8)
        if use_native(stored):
            torch.ops.infer.read_fields(stored, [each for field in self.fields for each in field], values)
        else:
            read_fields_reference(stored, self.fields, values)
        return Groups(values.view(torch.int8) if self.form.bits == 8 else values, *self.factors(stored))


def read_fields_reference(stored: Tensor, fields: Sequence[Field], values: Tensor) -> None:
    """Read fields in torch: [N, blocks, bytes of a block] uint8 -> `values`, [N, K] uint8."""
    values.zero_()
    place = 0
    for offset, width, run in fields:
        size = values.shape[1] // stored.shape[1] * width // 8
        own = stored[..., offset : offset + size].reshape(*stored.shape[:2], -1, 1, run)
        shifts = torch.arange(0, 8, width, dtype=torch.uint8).unsqueeze(-1)
        values |= ((own >> shifts & 2**width - 1) << place).view(values.shape)
        place += width


def read_into(tensor: GGUFTensor, panels: Tensor) -> None:
    """Read a quantized matrix into panels: uint8, of the bytes of its kind's form.

    Raises:
        StartupError: the file ends early.
    """
    kind = KINDS[tensor.kind]
    form = kind.form
    rows, inputs = tensor.shape
    blocks = inputs // (INPUTS * form.blocks)
    # Rows of heads are put in order all together: such matrices are small.
    step = rows if tensor.heads else max(1, CHUNK_WEIGHTS // (OUTPUTS * inputs)) * OUTPUTS
    with tensor.file.open("rb", buffering=0) as file:
        file.seek(tensor.offset)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            stored = torch.empty(count, blocks, tensor.num_bytes // (rows * blocks), dtype=torch.uint8)
            read_fully(file, stored.view(-1).numpy().data)
            if tensor.heads:
                stored = stored[tensor.order(rows).argsort()]
            end = form.num_bytes(first + count, inputs)
            pack_into(panels[form.num_bytes(first, inputs) : end], kind.read(stored), form)


def _halves(stored: Tensor, offset: int) -> Tensor:
    """View the float16 numbers at a byte of each block: [N, blocks, even number of bytes] -> [N, blocks]."""
    return stored.view(torch.float16)[..., offset // 2]


def _rows(values: Tensor) -> Tensor:
    """[N, …] int8 or uint8 -> [N, …] int8, of two dimensions."""
    return values.flatten(1).view(torch.int8)


def _scale(stored: Tensor) -> Factors:
    return Factors(_halves(stored, 0))


def _scale_and_min(stored: Tensor) -> Factors:
    return Factors(_halves(stored, 0), -_halves(stored, 2))


def _six_bit_codes(stored: Tensor) -> Factors:
    """Return two factors, and the codes of eight scales and of eight mins.

    The first four of both have the lower six bits of bytes. The upper two bits of these bytes, and the last four
    bytes, have the others.
    """
    a, b, c = stored[..., 4:16].reshape(*stored.shape[:2], 3, 4).unbind(2)
    scales = torch.cat([a & 63, (c & 15) | (a >> 6) << 4], dim=-1)
    mins = torch.cat([b & 63, (c >> 4) | (b >> 6) << 4], dim=-1)
    return Factors(_halves(stored, 0), _halves(stored, 2), _rows(scales), _rows(mins))


def _byte_codes(stored: Tensor) -> Factors:
    return Factors(_halves(stored, 208), codes=_rows(stored[..., 192:208]))


#: Every quantized type that is read, by its name.
KINDS = {
    "Q4_0": Kind(Form(4), _scale, (Field(2, 4, 16),)),
    "Q4_1": Kind(Form(4, mins=True), _scale_and_min, (Field(4, 4, 16),)),
    "Q5_0": Kind(Form(5), _scale, (Field(6, 4, 16), Field(2, 1, 1))),
    "Q5_1": Kind(Form(5, mins=True), _scale_and_min, (Field(8, 4, 16), Field(4, 1, 1))),
    "Q8_0": Kind(Form(8), _scale, (Field(2, 8, 32),)),
    "Q4_K": Kind(Form(4, blocks=8, groups=1, mins=True), _six_bit_codes, (Field(16, 4, 32),)),
    "Q5_K": Kind(
        Form(5, blocks=8, groups=1, mins=True), _six_bit_codes, (Field(48, 4, 32), Field(16, 1, 32))
    ),
    "Q6_K": Kind(Form(6, blocks=8, groups=2), _byte_codes, (Field(0, 4, 64), Field(128, 2, 32))),
}
