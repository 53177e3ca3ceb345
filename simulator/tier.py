"""Phase 11's tier in virtual time: the real index of blocks, above a disk that exists only as a rate."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, cast

from phase8_prefix.tree import Node
from phase11_tiered.block_file import HEADER_BYTES, BlockFile
from phase11_tiered.tier import Fetch, Tier
from simulator.clock import VirtualClock


class NoFile:
    """Stands for a `BlockFile` of `places` blocks."""

    path = Path("no file")

    def __init__(self, places: int) -> None:
        self.places = places

    def blocks(self) -> list[tuple[bytes, int]]:
        return []

    def write(self, place: int, key: bytes, data: bytes) -> None:
        pass

    def clear(self) -> None:
        pass


class SimulatedTier(Tier):
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
        places = limit // (HEADER_BYTES + block_bytes)
        super().__init__(cast(BlockFile, NoFile(places)), self._load_nothing, block_s)
        self.clock = clock
        self.read_s = block_bytes / bytes_s
        self._contents = bytes(block_bytes)
        self._due: deque[tuple[float, Callable[[], None]]] = deque()  # reads, and when each is done

    def take(self, fetch: Fetch, index: int) -> bytearray | None:
        while self._due and self._due[0][0] <= self.clock():
            self._due.popleft()[1]()
        return super().take(fetch, index)

    def _put(self, rank: int, function: Callable[..., None], *arguments: Any) -> bool:  # noqa: ARG002 - no queue
        if function == self._read:
            begins_s = max(self.clock(), self._due[-1][0] if self._due else 0.0)
            self._due.append((begins_s + self.read_s, partial(function, *arguments)))
        else:
            function(*arguments)
        return True

    def _read(self, key: bytes, read: Future[bytearray | None]) -> None:
        read.set_result(bytearray(self._contents) if key in self._places else None)

    def _load_nothing(self, node: Node) -> bytes:  # noqa: ARG002 - all blocks have the same contents
        return self._contents
