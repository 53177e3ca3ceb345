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

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from common.models.gguf.file import GGUFTensor
from common.models.loader import read_fully
from kernels.grouped import INPUTS, OUTPUTS, Form, Groups, pack_into

CHUNK_WEIGHTS = 2**20  # brought into panels at once: some megabytes


class Kind(NamedTuple):
    """A quantized type.

    Attributes:
        form: of its groups.
        read: takes rows as they are stored, [N, blocks, bytes of a block] uint8, and returns them as groups.
    """

    form: Form
    read: Callable[[Tensor], Groups]


def read_into(tensor: GGUFTensor, panels: Tensor) -> None:
    """Read a quantized matrix into panels: uint8, of the bytes of its kind's form.

    Raises:
        StartupError: the file ends early.
    """
    form, read = KINDS[tensor.kind]
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
            pack_into(panels[form.num_bytes(first, inputs) : end], read(stored), form)


def _halves(stored: Tensor) -> Tensor:
    """[N, blocks, 2] uint8 -> [N, blocks] float16."""
    return stored.contiguous().view(torch.float16).squeeze(-1)


def _fields(stored: Tensor, width: int) -> Tensor:
    """Divide bytes into numbers of `width` bits: [..., n] uint8 -> [..., n * 8 / width] uint8.

    First comes the lowest number of every byte, then the next of every byte, and so on. Four bytes are shifted at
    once: torch has no fast shift for single ones.
    """
    fours, mask = stored.contiguous().view(torch.int32), 0x01010101 * (2**width - 1)
    return torch.cat([((fours >> shift) & mask).view(torch.uint8) for shift in range(0, 8, width)], dim=-1)


def _bits(stored: Tensor) -> Tensor:
    """Return each bit as a byte, the lowest bit of a byte first: [..., n] uint8 -> [..., 8 n] uint8.

    Byte i of a product, eight copies of a byte, keeps bit i.
    """
    copies = stored.to(torch.int64) * 0x0101010101010101
    return (copies & -0x7FBFDFEFF7FBFDFF).view(torch.uint8).ne(0).view(torch.uint8)


def _divided(stored: Tensor, size: int) -> Tensor:
    """[N, blocks, n] -> [N, blocks, n / size, size]."""
    return stored.reshape(*stored.shape[:2], -1, size)


def _rows(values: Tensor) -> Tensor:
    """[N, …] -> [N, K]."""
    return values.flatten(1)


def _q4_0(stored: Tensor) -> Groups:
    return Groups(_rows(_fields(stored[..., 2:], 4)), _halves(stored[..., :2]))


def _q4_1(stored: Tensor) -> Groups:
    return Groups(
        _rows(_fields(stored[..., 4:], 4)), _halves(stored[..., :2]), mins=-_halves(stored[..., 2:4])
    )


def _q5_0(stored: Tensor) -> Groups:
    values = _fields(stored[..., 6:], 4) | _bits(stored[..., 2:6]) * 16
    return Groups(_rows(values), _halves(stored[..., :2]))


def _q5_1(stored: Tensor) -> Groups:
    values = _fields(stored[..., 8:], 4) | _bits(stored[..., 4:8]) * 16
    return Groups(_rows(values), _halves(stored[..., :2]), mins=-_halves(stored[..., 2:4]))


def _q8_0(stored: Tensor) -> Groups:
    return Groups(_rows(stored[..., 2:]).view(torch.int8), _halves(stored[..., :2]))


def _six_bit_codes(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of eight scales and of eight mins: [N, blocks, 12] uint8 -> [N, 8 blocks] int8 each.

    The first four of both have the lower six bits of bytes. The upper two bits of these bytes, and the last four
    bytes, have the others.
    """
    a, b, c = stored.reshape(*stored.shape[:2], 3, 4).unbind(2)
    scales = torch.cat([a & 63, (c & 15) | (a >> 6) << 4], dim=-1)
    mins = torch.cat([b & 63, (c >> 4) | (b >> 6) << 4], dim=-1)
    return _rows(scales).view(torch.int8), _rows(mins).view(torch.int8)


def _q4_k(stored: Tensor) -> Groups:
    return _with_codes(_fields(_divided(stored[..., 16:], 32), 4), stored)


def _q5_k(stored: Tensor) -> Groups:
    low = _fields(_divided(stored[..., 48:], 32), 4)
    return _with_codes(low | (_fields(stored[..., 16:48], 1) * 16).view(low.shape), stored)


def _with_codes(values: Tensor, stored: Tensor) -> Groups:
    codes, min_codes = _six_bit_codes(stored[..., 4:16])
    return Groups(_rows(values), _halves(stored[..., :2]), _halves(stored[..., 2:4]), codes, min_codes)


def _q6_k(stored: Tensor) -> Groups:
    low = _fields(_divided(stored[..., :128], 64), 4)
    high = _fields(_divided(stored[..., 128:192], 32), 2)
    codes = _rows(stored[..., 192:208]).view(torch.int8)
    return Groups(_rows(low | high * 16), _halves(stored[..., 208:]), codes=codes)


#: Every quantized type that is read, by its name.
KINDS = {
    "Q4_0": Kind(Form(4), _q4_0),
    "Q4_1": Kind(Form(4, mins=True), _q4_1),
    "Q5_0": Kind(Form(5), _q5_0),
    "Q5_1": Kind(Form(5, mins=True), _q5_1),
    "Q8_0": Kind(Form(8), _q8_0),
    "Q4_K": Kind(Form(4, blocks=8, groups=1, mins=True), _q4_k),
    "Q5_K": Kind(Form(5, blocks=8, groups=1, mins=True), _q5_k),
    "Q6_K": Kind(Form(6, blocks=8, groups=2), _q6_k),
}
