"""Phase 11's tier in virtual time: the real index of blocks, above a disk that exists only as a rate."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, cast

from phase11_tiered.block_file import HEADER_BYTES, BlockFile
from phase11_tiered.tier import Tier
from simulator.clock import VirtualClock


class Disk:
    """Stands for a `BlockFile` of `places` blocks. Blocks are read one after the other, and written in no time.

    Attributes:
        idle_s: the time when the reads so far have ended.
    """

    path = Path("no file")

    def __init__(self, clock: VirtualClock, places: int, block_bytes: int, read_s: float) -> None:
        self.places, self.block_bytes = places, block_bytes
        self.idle_s = 0.0
        self._clock, self._read_s = clock, read_s

    def blocks(self) -> list[tuple[bytes, int]]:
        return []

    def read(self, place: int, key: bytes) -> bytearray:  # noqa: ARG002 - all blocks have the same contents
        self.idle_s = max(self._clock(), self.idle_s) + self._read_s
        return bytearray(self.block_bytes)

    def write(self, place: int, key: bytes, data: memoryview) -> None:
        pass

    def clear(self) -> None:
        pass


class Due(Future[Any]):
    """What has its result, but ends at some time of a clock."""

    def __init__(self, clock: Callable[[], float], due_s: float) -> None:
        super().__init__()
        self._clock, self._due_s = clock, due_s

    def done(self) -> bool:
        return self._clock() >= self._due_s


class AtOnce(Executor):
    """Calls each function at once, in place of a thread. It ends when the disk's reads so far have ended."""

    def __init__(self, clock: VirtualClock, disk: Disk) -> None:
        self._clock, self._disk = clock, disk

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        result = function(*arguments, **named)
        ended = Due(self._clock, self._disk.idle_s)
        ended.set_result(result)
        return ended


class SimulatedTier(Tier):
    """A tier without a thread and a file.

    Args:
        clock: the engine's clock.
        block_bytes: bytes of a block of the model that is simulated.
        limit: bytes of the file.
        block_s: seconds that computing a block takes.
        bytes_s: bytes that are read in a second.
    """

    def __init__(
        self, clock: VirtualClock, block_bytes: int, limit: int, *, block_s: float, bytes_s: float
    ) -> None:
        read_s = block_bytes / bytes_s
        disk = Disk(clock, limit // (HEADER_BYTES + block_bytes), block_bytes, read_s)
        super().__init__(cast(BlockFile, disk), lambda blocks: [memoryview(b"")] * len(blocks), block_s)
        self.clock = clock
        self.read_s = read_s
        self._thread = AtOnce(clock, disk)

    def _read(self, place: int, key: bytes) -> bytearray:
        return self._file.read(place, key)  # it takes no real time, which the tier would measure
