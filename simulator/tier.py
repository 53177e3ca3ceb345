"""Phase 11's tier in virtual time: the real index of blocks, above a disk that exists only as a rate."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, cast

from phase11_tiered.block_file import HEADER_BYTES, BlockFile
from phase11_tiered.tier import Tier
from simulator.clock import VirtualClock


class NoFile:
    """Stands for a `BlockFile` of `places` blocks."""

    path = Path("no file")

    def __init__(self, places: int, block_bytes: int) -> None:
        self.places, self.block_bytes = places, block_bytes

    def blocks(self) -> list[tuple[bytes, int]]:
        return []

    def read(self, place: int, key: bytes) -> bytearray:  # noqa: ARG002 - all blocks have the same contents
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


class SimulatedTier(Tier, Executor):
    """A tier without a thread. Blocks are read one after the other, and written in no time.

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
        file = NoFile(limit // (HEADER_BYTES + block_bytes), block_bytes)
        super().__init__(cast(BlockFile, file), lambda blocks: [memoryview(b"")] * len(blocks), block_s)
        self.clock = clock
        self.read_s = block_bytes / bytes_s
        self._idle_s = 0.0
        self._thread = self

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        """Call a function at once. If it reads, it ends after the reads before it and the time of a read."""
        if function == self._read:
            self._idle_s = max(self.clock(), self._idle_s) + self.read_s
        ended = Due(self.clock, self._idle_s)
        ended.set_result(function(*arguments, **named))
        return ended

    def _read(self, place: int, key: bytes) -> bytearray:
        return self._file.read(place, key)
