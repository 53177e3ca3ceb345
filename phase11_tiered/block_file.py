"""A file with places for blocks. It outlives the process that wrote it, also if that process was killed.

```text
headers   place 0  key, time of the write, checksum of key, time and data
          place 1  …
data      place 0  one block: its keys and values in all layers
          place 1  …
```

A place's data is written before its header. If a write was interrupted, or the disk has changed a bit, the checksum
is wrong, and the block counts as missing. So there is no journal, and nothing to repair.

The checksum is XXH3, of 64 bits. It takes a tenth of a CRC's time, which would be taken from the passes.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import struct
import time
import weakref
from pathlib import Path

from xxhash import xxh3_64_intdigest

_FIELDS = struct.Struct("<32sQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


class DamagedBlockError(Exception):
    """A place does not hold the block that was written to it."""


class BlockFile:
    """A locked, preallocated file for as many blocks of `block_bytes` bytes as `limit` bytes hold.

    It is the first file `NAME-NUMBER.kv` of a folder that is not open elsewhere. A file of another size is emptied,
    since its places are elsewhere. When nothing refers to this object any more, the file is closed.

    Raises:
        OSError: the file cannot be opened, or the disk is full.
        ValueError: `limit` bytes are too few for a block.
    """

    def __init__(self, folder: Path, name: str, block_bytes: int, limit: int) -> None:
        self.block_bytes = block_bytes
        self.places = limit // (HEADER_BYTES + block_bytes)
        if not self.places:
            raise ValueError(f"{limit} bytes hold no block of {block_bytes} bytes")
        folder.mkdir(parents=True, exist_ok=True)
        for number in itertools.count():
            self.path = folder / f"{name}-{number}.kv"
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.fchmod(self._file, 0o600)
                if os.fstat(self._file).st_size != self._offset(self.places):
                    self.clear()
                break
            except OSError as error:
                os.close(self._file)
                if not isinstance(error, BlockingIOError):  # else another server has this file
                    raise
        self._close = weakref.finalize(self, os.close, self._file)

    def blocks(self) -> list[tuple[bytes, int]]:
        """Return keys and places of the blocks, in the order of their writes. Only `read` compares checksums."""
        table = os.pread(self._file, self.places * HEADER_BYTES, 0)
        starts = range(0, len(table), HEADER_BYTES)
        found = [(*_FIELDS.unpack_from(table, start), start // HEADER_BYTES) for start in starts]
        return [(key, place) for key, written, place in sorted(found, key=lambda each: each[1]) if written]

    def read(self, place: int, key: bytes) -> bytearray:
        """Return a block's data.

        Raises:
            DamagedBlockError: the place does not hold this block, or not all of it.
            OSError: the disk failed.
        """
        header = os.pread(self._file, HEADER_BYTES, place * HEADER_BYTES)
        data = bytearray(self.block_bytes)
        os.preadv(self._file, [data], self._offset(place))
        if not header.startswith(key) or header != _checked(header[: _FIELDS.size], data):
            raise DamagedBlockError(f"place {place} of {self.path} is damaged")
        return data

    def write(self, place: int, key: bytes, data: bytes | memoryview) -> None:
        """Write a block over whatever the place holds. Raises OSError: the disk failed."""
        header = _checked(_FIELDS.pack(key, time.time_ns()), data)
        for part, offset in ((data, self._offset(place)), (header, place * HEADER_BYTES)):
            if os.pwrite(self._file, part, offset) != len(part):
                raise OSError(f"{self.path}: the disk took only a part of a block")

    def clear(self) -> None:
        """Remove all blocks. Raises OSError: the disk is full."""
        os.ftruncate(self._file, 0)
        try:
            size = self._offset(self.places)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, 0, size)
            else:  # on macOS a full disk is then noticed at a write
                os.ftruncate(self._file, size)
        except OSError:
            os.ftruncate(self._file, 0)  # a file that is not used must not fill the disk
            raise

    def close(self) -> None:
        """Close and unlock the file."""
        self._close()

    def _offset(self, place: int) -> int:
        return self.places * HEADER_BYTES + place * self.block_bytes


def _checked(fields: bytes, data: bytes | bytearray | memoryview) -> bytes:
    """Return a header: its fields and their checksum, which includes the data."""
    return fields + _CHECKSUM.pack(xxh3_64_intdigest(data, seed=xxh3_64_intdigest(fields)))
