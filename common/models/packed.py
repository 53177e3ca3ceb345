"""Reads quantized matrices of Hugging Face folders: compressed-tensors, GPTQ and AWQ.

A matrix [N, K] has integers q, and a scale for each output and each group of inputs. There may be zero points, too,
and then `w = scale * (q - zero)`. Without zero points, zero is 2^(bits - 1). The integers of several weights are
packed into one int32, the lowest bits first:

```text
compressed-tensors   weight_packed [N, K * bits / 32]   weight_scale [N, G]   weight_zero_point [N * bits / 32, G]
                     or weight [N, K] int8: q - 2^(bits - 1)               or [N, G] int8: zero - 2^(bits - 1)
GPTQ                 qweight [K * bits / 32, N]         scales [G, N]         qzeros [G, N * bits / 32]
AWQ                  qweight [K, N / 8]                 scales [G, N]         qzeros [G, N / 8]
```

AWQ packs eight outputs in the order 0, 2, 4, 6, 1, 3, 5, 7. GPTQ's first format stores `zero - 1`. Where the inputs
of a group do not lie side by side (`desc_act`, `actorder`), `g_idx` has each input's group.

On a CPU with native kernels, the integers go into panels as they are (`kernels.grouped`). The product of a scale
and a zero point has more digits than a float16. So a panel has both apart: the scale as that of a min, and the zero
point as its code.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from common.errors import StartupError
from common.models.compressed import BITS, Scheme
from kernels.grouped import INPUTS, OUTPUTS, Form, Groups, pack_into

CHUNK_WEIGHTS = 2**22  # unpacked at once: 4 MB
#: The largest change of a scale that becomes a float16, beside the matrix's largest scale: that of a bfloat16.
LARGEST_CHANGE = 2**-9

_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # where outputs 0 to 7 lie in an int32

#: Endings of the names of tensors that belong to a quantized matrix, or that the model has no place for.
_ENDINGS = (
    *(".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx"),
    *(".qweight", ".qzeros", ".scales", ".g_idx", ".input_scale", ".input_zero_point"),
)


class Stored(Protocol):
    """A tensor on disk, in any format."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def num_bytes(self) -> int: ...

    def read_into(self, target: Tensor) -> None:
        """Read the tensor into `target`, which has the same shape, and convert it to the type of `target`."""


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A quantized matrix.

    Attributes:
        name: for messages.
        shape: N and K.
        bits: of a weight: 4 or 8.
        num_bytes: of all its tensors.
        integers: the tensor with the integers.
        unpack: takes the tensor's content and a range of outputs, and returns q of these: [n, K] uint8.
        scales: returns all scales: [N, G] float32.
        zeros: [N, G] uint8; None if all are 2^(bits - 1).
        group_of: [K] int64, the group of each input; None: groups lie one after the other.
    """

    name: str
    shape: tuple[int, int]
    bits: int
    num_bytes: int
    integers: Stored
    unpack: Callable[[Tensor, slice], Tensor]
    scales: Callable[[], Tensor]
    num_groups: int
    zeros: Tensor | None
    group_of: Tensor | None

    @property
    def group(self) -> int:
        """The inputs of a group."""
        return self.shape[1] // self.num_groups

    @property
    def form(self) -> Form | None:
        """The form of its panels. None: its groups are no whole blocks."""
        if self.group % INPUTS:
            return None
        blocks, mins = self.group // INPUTS, self.zeros is not None
        return Form(self.bits, blocks, groups=int(mins), mins=mins)

    @functools.cached_property
    def order(self) -> Tensor | None:
        """The inputs, group after group: [K] int64. None: they lie in this order."""
        return None if self.group_of is None else self.group_of.argsort(stable=True)

    @property
    def is_int8(self) -> bool:
        """Whether it has eight bits, and one scale for each output and nothing else."""
        return self.bits == 8 and self.num_groups == 1 and self.zeros is None

    def read_into(self, target: Tensor) -> None:
        """Read the matrix into `target`: int8, panels (uint8, of the bytes of `form`), or dequantized.

        Raises:
            StartupError: the file ends early, or the scales cannot become float16.
        """
        inputs = self.shape[1]
        integers = self.read_integers()
        scales = self.scales()
        halves = self._halves(scales) if target.dtype == torch.uint8 else scales
        step = max(1, CHUNK_WEIGHTS // (OUTPUTS * inputs)) * OUTPUTS
        for first in range(0, self.shape[0], step):
            rows = slice(first, min(first + step, self.shape[0]))
            values = self.unpack(integers, rows)
            if target.dtype == torch.int8:
                target[rows] = _signed(values)
            elif target.dtype == torch.uint8:
                form = self.form
                assert form is not None
                own = target[form.num_bytes(rows.start, inputs) : form.num_bytes(rows.stop, inputs)]
                pack_into(own, self._groups(values, halves[rows], rows), form)
            else:
                target[rows] = self._dequantized(values, scales[rows], rows).to(target)

    def read_integers(self) -> Tensor:
        return _read(self.integers, torch.int8 if self.integers.shape == self.shape else torch.int32)

    def _halves(self, scales: Tensor) -> Tensor:
        halves = scales.half()
        change = (halves.float() - scales).abs().max()
        if not change <= LARGEST_CHANGE * scales.abs().max():
            raise StartupError(
                f"{self.name}: its scales ({scales.abs().min():.2g} to {scales.abs().max():.2g}) cannot be float16 "
                "numbers: use --quantize none"
            )
        return halves

    def _groups(self, values: Tensor, scales: Tensor, rows: slice) -> Groups:
        if self.order is not None:
            values = values[:, self.order]
        if self.bits == 8:
            values = _signed(values)
        if self.zeros is None:
            return Groups(values, scales)
        zeros = self.zeros[rows].repeat_interleave(self.group // INPUTS, dim=1)
        min_codes = _signed(zeros) if self.bits == 8 else zeros.view(torch.int8)
        return Groups(values, scales, scales, torch.ones_like(min_codes), min_codes)

    def _dequantized(self, values: Tensor, scales: Tensor, rows: slice) -> Tensor:
        group_of = torch.arange(self.shape[1]) // self.group if self.group_of is None else self.group_of
        zeros = 2.0 ** (self.bits - 1) if self.zeros is None else self.zeros[rows][:, group_of].float()
        return (values.float() - zeros) * scales[:, group_of]


def _signed(values: Tensor) -> Tensor:
    """Subtract 128: uint8 -> int8."""
    return (values ^ 0x80).view(torch.int8)


def _read(tensor: Stored, dtype: torch.dtype) -> Tensor:
    content = torch.empty(tensor.shape, dtype=dtype)
    tensor.read_into(content)
    return content


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the integers in the rows of a matrix: [n, words] int32 -> [n, words * 32 / bits] uint8."""
    bytes = words.contiguous().view(torch.uint8)
    return bytes if bits == 8 else torch.stack([bytes & 15, bytes >> 4], dim=-1).flatten(1)


def _in_awq_order(words: Tensor) -> Tensor:
    """The same for AWQ: [n, words] int32 -> [n, 8 words] uint8."""
    return _unpacked(words, 4).view(len(words), -1, 8)[..., _AWQ_PLACES].flatten(1)


# ---------------------------------------------------------------------- one matrix of each method


class _Parts(NamedTuple):
    """The tensors of a matrix: their names after its `stem`, and all tensors of the checkpoint."""

    stem: str
    stored: Mapping[str, Stored]

    def find(self, ending: str) -> Stored | None:
        return self.stored.get(f"{self.stem}.{ending}")

    def get(self, ending: str) -> Stored:
        if (found := self.find(ending)) is None:
            raise StartupError(f"{self.stem}.{ending} is missing")
        return found

    @property
    def num_bytes(self) -> int:
        endings = {"weight", *(ending.removeprefix(".") for ending in _ENDINGS)}
        return sum(part.num_bytes for ending in endings if (part := self.find(ending)) is not None)

    def wrong(self, ending: str) -> StartupError:
        return StartupError(
            f"{self.stem}.{ending} is {list(self.get(ending).shape)}, which does not fit its other tensors"
        )

    def group_of(self, ending: str, inputs: int, num_groups: int) -> Tensor | None:
        """Read each input's group. None: there are no such numbers, or groups lie one after the other."""
        entry = self.find(ending)
        if entry is None:
            return None
        if entry.shape != (inputs,):
            raise self.wrong(ending)
        found = _read(entry, torch.int64)
        if (found == -1).all():  # compressed-tensors: never set
            return None
        in_order = torch.arange(inputs) // (inputs // num_groups)
        if not torch.equal(found.sort().values, in_order):
            raise StartupError(f"{self.stem}.{ending}: its groups have different sizes, and that is not run")
        return None if torch.equal(found, in_order) else found


def _compressed(parts: _Parts) -> PackedMatrix:
    scales = parts.get("weight_scale")
    integers = parts.find("weight_packed") or parts.get("weight")
    if parts.find("weight_packed") is None:  # int-quantized
        shape, bits = integers.shape, 8
    else:
        shape = tuple(_read(parts.get("weight_shape"), torch.int64).tolist())
        fitting = [each for each in BITS if integers.shape == (shape[0], -(-shape[-1] * each // 32))]
        if not fitting:
            raise parts.wrong("weight_packed")
        bits = fitting[0]
    if len(shape) != 2 or len(scales.shape) != 2 or scales.shape[0] != shape[0] or shape[1] % scales.shape[1]:
        raise parts.wrong("weight_scale")
    outputs, inputs = shape
    zeros = None
    if (entry := parts.find("weight_zero_point")) is not None:
        if entry.shape == scales.shape:
            zeros = (_read(entry, torch.int32) + 2 ** (bits - 1)).to(torch.uint8)
        elif entry.shape == (-(-outputs * bits // 32), scales.shape[1]):
            zeros = _unpacked(_read(entry, torch.int32).T, bits)[:, :outputs].T
        else:
            raise parts.wrong("weight_zero_point")

    def unpack(content: Tensor, rows: slice) -> Tensor:
        if content.dtype == torch.int8:
            return content[rows].view(torch.uint8) ^ 0x80
        return _unpacked(content[rows], bits)[:, :inputs]

    return PackedMatrix(
        name=parts.stem,
        shape=(outputs, inputs),
        bits=bits,
        num_bytes=parts.num_bytes,
        integers=integers,
        unpack=unpack,
        scales=lambda: _read(scales, torch.float32),
        num_groups=scales.shape[1],
        zeros=_unless_middle(zeros, bits),
        group_of=parts.group_of("weight_g_idx", inputs, scales.shape[1]),
    )


def _transposed(parts: _Parts, *, awq: bool, zero_offset: int) -> PackedMatrix:
    """Read a matrix of GPTQ or AWQ."""
    integers, scales, packed_zeros = parts.get("qweight"), parts.get("scales"), parts.get("qzeros")
    num_groups, outputs = scales.shape
    bits = packed_zeros.shape[-1] * 32 // outputs
    if bits not in BITS or packed_zeros.shape != (num_groups, outputs * bits // 32):
        raise parts.wrong("qzeros")
    inputs = integers.shape[0] if awq else integers.shape[0] * 32 // bits
    packed_outputs = outputs // 8 if awq else outputs
    if integers.shape[1:] != (packed_outputs,) or inputs % num_groups:
        raise parts.wrong("qweight")
    stored_zeros = _read(packed_zeros, torch.int32)
    zeros = _in_awq_order(stored_zeros) if awq else _unpacked(stored_zeros, bits)
    zeros = (zeros + zero_offset) & (2**bits - 1)

    def unpack(content: Tensor, rows: slice) -> Tensor:
        if awq:
            return _in_awq_order(content[:, rows.start // 8 : rows.stop // 8]).T.contiguous()
        return _unpacked(content[:, rows].T, bits)

    return PackedMatrix(
        name=parts.stem,
        shape=(outputs, inputs),
        bits=bits,
        num_bytes=parts.num_bytes,
        integers=integers,
        unpack=unpack,
        scales=lambda: _read(scales, torch.float32).T.contiguous(),
        num_groups=num_groups,
        zeros=_unless_middle(zeros.T, bits),
        group_of=parts.group_of("g_idx", inputs, num_groups),
    )


def _unless_middle(zeros: Tensor | None, bits: int) -> Tensor | None:
    """Return zero points, or None if all are 2^(bits - 1)."""
    return None if zeros is None or bool((zeros == 2 ** (bits - 1)).all()) else zeros.contiguous()


# ---------------------------------------------------------------------- all tensors


def with_matrices(stored: Mapping[str, Stored], scheme: Scheme) -> dict[str, Stored]:
    """Return a checkpoint's tensors, in the same order, with each quantized matrix as one, named `….weight`.

    If all of them are int8 with one scale for each output, there are these scales, too, named `….weight_scale`.
    Other tensors that the model has no place for are left out.

    Raises:
        StartupError: tensors of a matrix are missing, do not fit each other, or cannot be read.
    """
    found: dict[str, Stored] = {}
    for name, tensor in stored.items():
        parts = _Parts(name.rpartition(".")[0], stored)
        if _has_integers(name, parts):
            matrix = (
                _compressed(parts)
                if scheme.method == "compressed-tensors"
                else _transposed(parts, awq=scheme.method == "awq", zero_offset=scheme.zero_offset)
            )
            found[f"{parts.stem}.weight"] = matrix
        elif not name.endswith(_ENDINGS):
            found[name] = tensor
    if are_int8(found):
        found |= {f"{name}_scale": stored[f"{name}_scale"] for name in matrices_of(found)}
    return found


def _has_integers(name: str, parts: _Parts) -> bool:
    return name.endswith((".weight_packed", ".qweight")) or (
        name.endswith(".weight") and parts.find("weight_scale") is not None
    )


def matrices_of(tensors: Mapping[str, Stored]) -> dict[str, PackedMatrix]:
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, PackedMatrix)}


def are_int8(tensors: Mapping[str, Stored]) -> bool:
    """Return whether there are quantized matrices, and all can be computed as int8."""
    matrices = matrices_of(tensors).values()
    return bool(matrices) and all(matrix.is_int8 for matrix in matrices)


def bits_a_weight(tensors: Mapping[str, Stored]) -> float:
    """Return the mean bits of a quantized weight, with scales and zero points."""
    matrices = matrices_of(tensors).values()
    return 8 * sum(each.num_bytes for each in matrices) / sum(math.prod(each.shape) for each in matrices)


def without_empty_biases(tensors: Mapping[str, Stored], names: Collection[str]) -> dict[str, Stored]:
    """Leave out biases of quantized matrices that are all zero, unless they are among `names`.

    AutoGPTQ gives every matrix a bias, whether the model has one or not.
    """

    def is_empty(name: str, tensor: Stored) -> bool:
        matrix = tensors.get(name.removesuffix("bias") + "weight")
        if name in names or not name.endswith(".bias") or not isinstance(matrix, PackedMatrix):
            return False
        return not _read(tensor, torch.float32).any()

    return {name: tensor for name, tensor in tensors.items() if not is_empty(name, tensor)}
