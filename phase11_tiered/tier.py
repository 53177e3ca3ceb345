"""Finds blocks in a file, has a thread read and write them, and evicts old ones.

```text
engine's thread   keep(nodes) ─> copies to write ┐
                                                 ├─> the tier's thread, one after the other ─> file
                  read(keys)  ─> reads           ┘
```

The index says what the file will hold when all reads and writes in the queue have ended. They are done in their
order, so each read finds its block. Only the engine's thread uses the index, and it never waits for the other one.
If reading takes too long or fails, a request's blocks are computed instead.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from weakref import WeakValueDictionary

import torch

from phase8_prefix.tree import Node
from phase11_tiered.block_file import BlockFile

logger = logging.getLogger(__name__)

MOST_WRITES = 128  # copies of blocks that wait; while there are so many, further blocks are not written
MOST_READS = 32  # blocks of one request that are read and were not taken: they take memory beside the pool
BOUND_S = 0.5  # how much longer than computing them the reads of a request's blocks may take
LATE = 10  # a disk that was late counts as so many times slower than computing
FORGETTING = 0.9  # factor on the measured time of a read whenever reads are declined
NICE = 10  # of the tier's thread: passes go first


def _lower_priority() -> None:
    """Give passes the cores before the calling thread: a pass waits for the slowest of its threads."""
    if sys.platform == "linux":  # elsewhere, a priority is a process's
        os.nice(NICE)


class Tier:
    """The blocks in a file, by their keys. If the file is full, the least recently used block is evicted.

    Args:
        file: the file.
        load: returns copies of the pool's blocks with these ids.
        block_s: seconds that computing a block takes.
    """

    def __init__(
        self, file: BlockFile, load: Callable[[Sequence[int]], Iterable[memoryview]], block_s: float
    ) -> None:
        self.block_s = block_s
        self.read_s = 0.0  # seconds of a block's read, a moving average; 0: none was read
        self.clock = time.monotonic
        self._file, self._load = file, load
        self._thread: Executor = ThreadPoolExecutor(1, "kv-tier", _lower_priority)
        self._places = OrderedDict(file.blocks())  # key -> place, least recently used first
        self._free = list(set(range(file.places)) - set(self._places.values()))
        self._reads: WeakValueDictionary[bytes, Future[bytearray]] = WeakValueDictionary()
        self._writes: deque[tuple[bytes, Future[None]]] = deque()  # keys and writes
        self._counts: defaultdict[str, float] = defaultdict(int)

    @property
    def size(self) -> tuple[int, int]:
        """Number of blocks in the file, and of places."""
        return len(self._places), self._file.places

    def counts(self) -> Mapping[str, float]:
        """Return the totals since the start, by their names in `telemetry.Counters`."""
        self._end_writes()
        return self._counts

    def read(self, keys: Iterable[bytes], path: Sequence[Node]) -> Iterator[bytearray | None]:
        """Read the blocks that follow a path, as many as the file has. Begins at the first `next`.

        Yields None while the next block is being read, and then its data, by which the caller extends the path. A
        block by which the path has grown meanwhile is left out. The first is always None. Ends after the last
        block, at once if computing the blocks takes less time than reading them, and early if a read fails or if
        all takes too long. Blocks that have come are never too late: a long step may have kept the caller.
        """
        first, waited_for = len(path), -1
        known = list(itertools.takewhile(self._places.__contains__, keys))
        compute_s = len(known) * self.block_s
        if known and (len(self._writes) + len(self._reads) + len(known)) * self.read_s > compute_s:
            self._counts["tier_declined"] += len(known)
            self.read_s *= FORGETTING
            return
        until_s = self.clock() + compute_s + BOUND_S
        for index, key in enumerate(known):
            ahead = self._start(known[index : index + MOST_READS])
            if not ahead:
                return  # the block was evicted meanwhile
            if index == 0:
                waited_for = 0
                yield None
            while len(path) == first + index:
                if not ahead[0].done():
                    if self.clock() <= until_s:
                        waited_for = index
                        yield None
                        continue
                    if waited_for == index:  # else its read has just begun: steps took the time, not the disk
                        self._fail("blocks were not read in time", len(known) - index)
                        self.read_s = LATE * self.block_s
                    return
                if error := ahead[0].exception():
                    self._fail(error)
                    self._forget(key)  # it is written again when it was computed
                    return
                self._counts["tier_hits"] += 1
                self._counts["tier_read_bytes"] += self._file.block_bytes
                self._counts["tier_saved_s"] += self.block_s - self.read_s
                yield ahead[0].result()

    def keep(self, nodes: Sequence[Node]) -> None:
        """Write the nodes' blocks that the file lacks, as far as the disk is not behind and there is memory for
        copies."""
        self._end_writes()
        missing = [node for node in nodes if node.digest not in self._places]
        taken = missing[: max(0, MOST_WRITES - len(self._writes))]
        copies: Iterable[memoryview] = []
        try:
            copies = self._load([node.block for node in taken])
        except (MemoryError, torch.OutOfMemoryError):
            taken = []
        self._counts["tier_skipped"] += len(missing) - len(taken)
        for node, data in zip(taken, copies, strict=True):
            place = self._free.pop() if self._free else self._places.popitem(last=False)[1]
            self._places[node.digest] = place
            write = self._thread.submit(self._file.write, place, node.digest, data)
            self._writes.append((node.digest, write))

    def touch(self, path: Sequence[Node]) -> None:
        """Count the blocks of a text as used, the first one last: without it, the others cannot be used."""
        for node in reversed(path):
            if node.digest in self._places:
                self._places.move_to_end(node.digest)

    def clear(self) -> None:
        """Remove all blocks from the file, also those that wait to be written."""
        self._places.clear()
        self._free = list(range(self._file.places))
        self._writes.append((b"", self._thread.submit(self._file.clear)))

    def _start(self, keys: Sequence[bytes]) -> list[Future[bytearray]]:
        """Return the reads of these blocks, up to the first that the file lacks. Requests that wait for the same
        block share its read."""
        reads = []
        for key in itertools.takewhile(self._places.__contains__, keys):
            if (read := self._reads.get(key)) is None:
                self._reads[key] = read = self._thread.submit(self._read, self._places[key], key)
            reads.append(read)
        return reads

    def _read(self, place: int, key: bytes) -> bytearray:
        """Read a block, and measure how long that takes. The tier's thread calls this.

        Raises:
            DamagedBlockError: the place does not hold this block.
            OSError: the disk failed.
        """
        began_s = time.perf_counter()
        data = self._file.read(place, key)
        took_s = time.perf_counter() - began_s
        self.read_s = 0.8 * self.read_s + 0.2 * took_s if self.read_s else took_s
        return data

    def _end_writes(self) -> None:
        """Forget the blocks whose writes have failed, and count the others."""
        while self._writes and self._writes[0][1].done():
            key, write = self._writes.popleft()
            if error := write.exception():
                self._fail(error)
                self._forget(key)
            elif key:
                self._counts["tier_written_bytes"] += self._file.block_bytes

    def _fail(self, why: object, blocks: int = 1) -> None:
        if not self._counts["tier_failures"]:
            logger.warning("%s (further failures of the file are only counted)", why)
        self._counts["tier_failures"] += blocks

    def _forget(self, key: bytes) -> None:
        if key in self._places:
            self._free.append(self._places.pop(key))
