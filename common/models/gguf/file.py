"""Reads GGUF files: llama.cpp's format, one file with metadata, tokenizer and (usually quantized) tensors.

A large model may be split into several files (`NAME-00001-of-00003.gguf`). The first has the metadata, and each has
some of the tensors.

```text
"GGUF", version, number of tensors, number of metadata entries
metadata:  key, type, value            llama.block_count = 30, tokenizer.ggml.tokens = [...]
tensors:   name, shape, type, offset   blk.0.attn_q.weight [576, 576] Q4_1 at 27649024
data:      each tensor at its offset, aligned (by default to 32 bytes)
```

Tensors are dequantized by the official library, `gguf`. The header is read here, because the library's reader makes
several objects of each entry of an array. That reader took seconds and hundreds of megabytes for a vocabulary of
262,144 tokens, and did not end on a damaged file whose header announces 2^60 entries.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.errors import StartupError

if TYPE_CHECKING:  # a server's own process reads the header, and does without torch
    from torch import Tensor

#: The types that can be read. The types in `PLAIN` are not quantized.
PLAIN = ("F32", "F16", "BF16")
READABLE = (*PLAIN, "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_PART = re.compile(r"(?P<model>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")
_PART_NAME = "{}-{:05d}-of-{:05d}.gguf"
_MOST_BYTES = 2**27  # of one metadata entry, and of the table of tensors: many times those of any model
_CHUNK_VALUES = 2**18  # dequantized at once: 1 MB as float32


class _DamagedError(Exception):
    """The bytes of a header are invalid."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor's type, shape and place in a GGUF file, and the changes that llama.cpp's converter made to it.

    Attributes:
        heads: number of attention heads whose rows the converter interleaved; 0: rows are in order.
        added: a number that the converter added to the tensor.
    """

    file: Path
    kind: str
    shape: tuple[int, ...]
    offset: int  # first byte in the file
    num_bytes: int
    heads: int = 0
    added: float = 0.0

    def read_into(self, target: Tensor) -> None:
        """Read the tensor from the file, and write its dequantized values to `target`.

        If `target` is uint8, it is room for panels (`kernels.grouped`), and the tensor's own numbers are written.

        The changes that llama.cpp's converter made to the tensor (`heads`, `added`) are undone.

        Raises:
            StartupError: the file ends early.
        """
        import gguf
        import torch

        from common.models.gguf import groups
        from common.models.loader import read_fully

        if target.dtype == torch.uint8:
            groups.read_into(self, target)
            return
        kind = gguf.GGMLQuantizationType[self.kind]
        rows = self.shape[0] if self.heads else math.prod(self.shape[:-1])
        width = math.prod(self.shape) // rows
        row_bytes = self.num_bytes // rows
        flat = target.view(rows, width)
        order = self.order(rows).to(target.device)
        step = max(1, _CHUNK_VALUES // width)
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.offset)
            for first in range(0, rows, step):
                places = order[first : first + step]
                stored = np.empty((len(places), row_bytes), np.uint8)
                read_fully(file, stored.data.cast("B"))
                values = torch.from_numpy(gguf.dequantize(stored, kind)) - self.added
                flat.index_copy_(0, places, values.to(flat))

    def order(self, rows: int) -> Tensor:
        """Return the number of the row in `target` that each stored row is written to: [rows] int64.

        In a head of size d, llama.cpp rotates pairs of neighbouring coordinates, and Hugging Face's code pairs of
        coordinates i and i + d/2. So the converter stores the rows of a head as 0, d/2, 1, d/2 + 1, ...
        """
        import torch

        order = torch.arange(rows)
        return order.view(self.heads, 2, -1).transpose(1, 2).reshape(-1) if self.heads else order


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The header of a GGUF file, or of all parts of a split one: metadata, and tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Read a model's header: that of one file or, if the model is split into parts, of all its parts.

        Args:
            path: the file, or any of the parts. The metadata are those of the first part.

        Raises:
            StartupError: a file cannot be read, is damaged or no GGUF file, or has a tensor of a type that is not
                in `READABLE`. Or a part is missing, or is not from the same model.
        """
        file = cls._open_one(path)
        if file.metadata.get("split.count", 1) in (0, 1):  # `gguf-split --merge` writes 0
            return file
        parts = [cls._open_one(part) for part in _parts_of(file)]
        tensors: dict[str, GGUFTensor] = {}
        for number, part in enumerate(parts):
            if part.metadata.get("split.no") != number or part.tensors.keys() & tensors.keys():
                raise StartupError(f"{part.path} is not part {number + 1} of the model in {path}")
            tensors |= part.tensors
        count = parts[0].metadata.get("split.tensors.count")
        if count != len(tensors):
            raise StartupError(f"{path}: its parts have {len(tensors)} tensors, and must have {count!r}")
        return cls(parts[0].path, parts[0].metadata, tensors)

    @classmethod
    def _open_one(cls, path: Path) -> GGUFFile:
        try:
            with path.open("rb") as file:
                magic = file.read(len(_MAGIC))
                if magic != _MAGIC:
                    raise StartupError(
                        f"{path} is no GGUF file: it begins with {magic!r}, not with {_MAGIC!r}"
                    )
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                    return cls(path, *_Header(path, content).read())
        except OSError as error:
            raise StartupError(f"{path} cannot be read: {error.strerror}") from None
        except (_DamagedError, UnicodeDecodeError) as error:
            raise StartupError(
                f"{path} ({path.stat().st_size} bytes) is damaged or cut off: {error}; download it again"
            ) from None


def is_gguf(path: Path) -> bool:
    """Return whether a path is a file that begins as GGUF files do. Ollama's files have no ending `.gguf`."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def first_part(names: Iterable[str]) -> str | None:
    """Return the name of a split model's first part, if `names` are parts of one model; else None."""
    found = [_PART.fullmatch(name) for name in names]
    models = {(part["model"], part["count"]) if part else None for part in found}
    if len(models) != 1 or (model := models.pop()) is None:
        return None
    return _PART_NAME.format(model[0], 1, int(model[1]))


def _parts_of(file: GGUFFile) -> list[Path]:
    """Return the paths of a split model's parts, in order. `file` is one of them.

    Raises:
        StartupError: a part is missing, or the name of `file` is not that of a part.
    """
    count = file.metadata["split.count"]
    name = _PART.fullmatch(file.path.name)
    if name is None or count != int(name["count"]):
        raise StartupError(
            f"{file.path} is one part of a model that is split into {count!r} parts, and its name does not tell "
            "the others': it must end in -00001-of-00002.gguf, or so"
        )
    parts = [file.path.with_name(_PART_NAME.format(name["model"], i + 1, count)) for i in range(count)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise StartupError(
            f"{file.path} is one of {count} parts, and {len(missing)} are missing: {missing[0]}"
            + (" and others" if len(missing) > 1 else "")
        )
    return parts


class _Header:
    """Reads a header from its first byte to its last. A size is compared with the bytes left before it is used."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path = path
        self._content = content
        self._at = len(_MAGIC)

    def read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        (version,) = self._take("I")
        if version not in _VERSIONS:
            raise StartupError(
                f"{self._path} is GGUF of version {version}; versions {' and '.join(map(str, _VERSIONS))} are read"
            )
        tensor_count, entry_count = self._take("QQ")
        metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = self._string()
            (kind,) = self._take("I")
            if key in metadata:
                raise _DamagedError(f"it has {key!r} twice")
            metadata[key] = self._value(kind)
        entries = [self._tensor() for _ in range(self._plausible(tensor_count, 24))]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise _DamagedError(f"its alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, kind, shape, offset in entries:
            if name in tensors:
                raise _DamagedError(f"it has {name} twice")
            tensors[name] = self._placed(name, kind, shape, start + offset)
        return metadata, tensors

    def _take(self, layout: str) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{layout}")
        self._plausible(1, size)
        self._at += size
        return struct.unpack_from(f"<{layout}", self._content, self._at - size)

    def _plausible(self, count: int, size: int) -> int:
        """Return `count`.

        Raises:
            _DamagedError: the rest of the file cannot hold that many values of `size` bytes, or they have more
                than `_MOST_BYTES`.
        """
        left = len(self._content) - self._at
        if count * size > min(left, _MOST_BYTES):
            raise _DamagedError(f"its header announces at least {count * size} bytes, and {left} are left")
        return count

    def _string(self) -> str:
        (length,) = self._take("Q")
        self._plausible(length, 1)
        self._at += length
        return self._content[self._at - length : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._take(self._scalar(kind))[0]
        element, count = self._take("IQ")
        if element == _STRING:
            return [self._string() for _ in range(self._plausible(count, 8))]
        layout = self._scalar(element)
        return list(self._take(f"{self._plausible(count, struct.calcsize(layout))}{layout}"))

    @staticmethod
    def _scalar(kind: int) -> str:
        if kind not in _SCALARS:
            raise _DamagedError(f"a metadata entry has the unknown type {kind}")
        return _SCALARS[kind]

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string()
        (dimensions,) = self._take("I")
        if not 1 <= dimensions <= 4:
            raise _DamagedError(f"{name} has {dimensions} dimensions")
        shape = self._take(f"{dimensions}Q")
        kind, offset = self._take("IQ")
        return name, kind, tuple(reversed(shape)), offset  # ggml names the innermost dimension first

    def _placed(self, name: str, number: int, shape: tuple[int, ...], offset: int) -> GGUFTensor:
        """Return a tensor, after checking that all its bytes lie in the file. `number` stands for its type in ggml.

        Raises:
            StartupError: the type is not in `READABLE`.
            _DamagedError: the tensor has a shape that its type cannot have, or ends after the file.
        """
        import gguf

        try:
            kind = gguf.GGMLQuantizationType(number).name
        except ValueError:
            kind = f"the unknown type {number}"
        if kind not in READABLE:
            raise StartupError(f"{self._path}: {name} is stored as {kind}; we read {', '.join(READABLE)}")
        block_values, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]
        num_bytes = math.prod(shape) // block_values * block_bytes
        if 0 in shape or shape[-1] % block_values:
            raise _DamagedError(f"{name} has the shape {list(shape)}, which {kind} cannot have")
        if offset + num_bytes > len(self._content):
            raise _DamagedError(f"{name} ends {offset + num_bytes - len(self._content)} bytes after the file")
        return GGUFTensor(self._path, kind, shape, offset, num_bytes)
