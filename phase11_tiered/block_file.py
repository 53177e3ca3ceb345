"""A file of places for blocks, which outlives the process that wrote it.

```text
headers   place 0  key, parent's key, number of the write, length and checksum of the data, header's own checksum
          place 1  …
data      place 0  one block: its keys and values in all layers
          place 1  …
```

A place's data is written before its header. If a write was interrupted, or the disk has changed a bit, a checksum
is wrong, and the block counts as missing. So a process may be killed at any time, and no journal is needed.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: Key, parent's key, number of the write, length of the data, its checksum. The checksum of these bytes follows.
_FIELDS = struct.Struct("<32s32sQII")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


class DamagedBlockError(Exception):
    """A place does not hold the block that was written to it."""


class Header(NamedTuple):
    """A place's header.

    Attributes:
        key: name of the block and of all blocks before it in their text, 32 bytes.
        parent: key of the block before it.
        written: number of the write, which grows from write to write.
        length: bytes of data.
        checksum: CRC-32 of the data.
    """

    key: bytes
    parent: bytes
    written: int
    length: int
    checksum: int

    def packed(self) -> bytes:
        fields = _FIELDS.pack(*self)
        return fields + _CHECKSUM.pack(zlib.crc32(fields))

    @classmethod
    def unpack(cls, packed: bytes) -> Header | None:
        """Return the header in `HEADER_BYTES` bytes; None: they hold none, or a damaged one."""
        fields = packed[: _FIELDS.size]
        header = cls(*_FIELDS.unpack(fields))
        return (
            header if header.length and packed[_FIELDS.size :] == _CHECKSUM.pack(zlib.crc32(fields)) else None
        )


class BlockFile:
    """A locked, preallocated file of `places` blocks of `block_bytes` bytes each. One thread uses it.

    A file of another size is emptied, since its places are elsewhere.

    Raises:
        BlockingIOError: another process, or another object of this process, has the file open.
        OSError: the file cannot be opened, or the disk is full.
        ValueError: `limit` bytes are too few for a block.
    """

    def __init__(self, path: Path, block_bytes: int, limit: int) -> None:
        self.path, self.block_bytes = path, block_bytes
        self.places = limit // (HEADER_BYTES + block_bytes)
        if not self.places:
            raise ValueError(f"{limit} bytes hold no block of {block_bytes} bytes")
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(self._file, 0o600)
            if os.fstat(self._file).st_size != self.places * (HEADER_BYTES + block_bytes):
                self.clear()
        except OSError:
            os.close(self._file)
            raise

    @classmethod
    def open(cls, folder: Path, name: str, block_bytes: int, limit: int) -> BlockFile:
        """Open the first file `NAME-NUMBER.kv` of a folder that is not open elsewhere. Raises as the class does."""
        folder.mkdir(parents=True, exist_ok=True)
        for number in itertools.count():
            try:
                return cls(folder / f"{name}-{number}.kv", block_bytes, limit)
            except BlockingIOError:
                continue
        raise AssertionError("numbers do not end")

    def headers(self) -> Iterator[tuple[int, Header]]:
        """Yield the places that hold blocks, and their headers."""
        packed = os.pread(self._file, self.places * HEADER_BYTES, 0)
        for place in range(len(packed) // HEADER_BYTES):
            if header := Header.unpack(packed[place * HEADER_BYTES : (place + 1) * HEADER_BYTES]):
                yield place, header

    def read(self, place: int, key: bytes) -> bytes:
        """Return a block's data.

        Raises:
            DamagedBlockError: the place does not hold this block, or not all of it.
            OSError: the disk failed.
        """
        packed = os.pread(self._file, HEADER_BYTES, place * HEADER_BYTES)
        header = Header.unpack(packed) if len(packed) == HEADER_BYTES else None
        data = os.pread(self._file, self.block_bytes, self._offset(place))
        if (
            header is None
            or (header.key, header.length) != (key, len(data))
            or header.checksum != zlib.crc32(data)
        ):
            raise DamagedBlockError(f"place {place} of {self.path} is damaged")
        return data

    def write(self, place: int, key: bytes, parent: bytes, written: int, data: bytes) -> None:
        """Write a block over whatever the place holds. Raises OSError: the disk failed."""
        header = Header(key, parent, written, len(data), zlib.crc32(data))
        self._write(data, self._offset(place))
        self._write(header.packed(), place * HEADER_BYTES)

    def clear(self) -> None:
        """Remove all blocks. Raises OSError: the disk is full."""
        os.ftruncate(self._file, 0)
        try:
            os.posix_fallocate(self._file, 0, self.places * (HEADER_BYTES + self.block_bytes))
        except OSError:
            os.ftruncate(self._file, 0)  # a file that is not used must not fill the disk
            raise

    def close(self) -> None:
        """Close and unlock the file."""
        os.close(self._file)

    def _offset(self, place: int) -> int:
        return self.places * HEADER_BYTES + place * self.block_bytes

    def _write(self, data: bytes, offset: int) -> None:
        if os.pwrite(self._file, data, offset) != len(data):
            raise OSError(f"{self.path}: the disk took only a part of a block")
