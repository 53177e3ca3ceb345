"""Finds blocks in a file, reads and writes them in a thread, and evicts old ones.

```text
engine's thread   keep(node)   ─> jobs, reads first ─> the tier's thread ─> file
                  fetch(keys)                                │
                  take         <─────────── reads that are done
```

The engine never waits for the thread. If reading takes too long or fails, a request's blocks are computed instead.
Only the thread changes the index of the file. The engine's thread only asks whether a key is in it.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import PriorityQueue
from typing import Any
from weakref import WeakValueDictionary

from phase8_prefix.tree import Node
from phase11_tiered.block_file import BlockFile

logger = logging.getLogger(__name__)

MOST_JOBS = 4096  # waiting jobs; while there are so many, further blocks are not written
MOST_READS = 32  # blocks of one fetch that are read and were not taken: they take memory beside the pool
BOUND_S = 0.5  # how much longer than computing its blocks a fetch may take
LATE = 10  # a disk that was late counts as so many times slower than computing
FORGETTING = 0.9  # factor on the measured time of a read whenever reads are declined
READ, WRITE = range(2)  # ranks of jobs

Read = Future[bytearray | None]  # None: it has failed


@dataclass
class Fetch:
    """The reads for one request. `keys`: the blocks that are still to come, from block `first` of its text on."""

    keys: Sequence[bytes] = ()
    first: int = 0
    until_s: float = 0.0
    reads: dict[bytes, Read] = field(default_factory=dict)  # of the next blocks


class Tier:
    """The blocks in a file, by their keys. If the file is full, the least recently used block is evicted.

    Args:
        file: the file. A thread must call `work`.
        load: returns the bytes of a node's block in the pool; None if the node has left the tree. The thread calls
            it.
        block_s: seconds that computing a block takes.
    """

    def __init__(self, file: BlockFile, load: Callable[[Node], bytes | None], block_s: float) -> None:
        self.block_s = block_s
        self.read_s = 0.0  # seconds of a block's read, a moving average; 0: none was read
        self.saved_s = 0.0
        self.counters: Counter[str] = Counter()  # see `telemetry.Counters`
        self.clock = time.monotonic
        self._file, self._load = file, load
        self._places = OrderedDict(file.blocks())  # key -> place, least recently used first
        self._free = list(set(range(file.places)) - set(self._places.values()))
        self._reads: WeakValueDictionary[bytes, Read] = WeakValueDictionary()
        self._jobs: PriorityQueue[tuple[int, int, Callable[[], None] | None]] = PriorityQueue()
        self._numbers = itertools.count()
        self._counting = threading.Lock()
        logger.info("%s holds %d of at most %d blocks", file.path, *self.size)

    # ------------------------------------------------------------------ for the engine's thread

    @property
    def size(self) -> tuple[int, int]:
        """Number of blocks in the file, and of places."""
        return len(self._places), self._file.places

    def fetch(self, keys: Iterable[bytes], first: int) -> Fetch:
        """Begin to read blocks of a text, from block `first` on, as many as the file has. Reads none if computing
        them takes less time."""
        known = list(itertools.takewhile(self._places.__contains__, keys))
        compute_s = len(known) * self.block_s
        if known and (len(self._reads) + len(known)) * self.read_s > compute_s:
            self._count("tier_declined", len(known))
            self.read_s *= FORGETTING
            return Fetch()
        return Fetch(known, first, self.clock() + compute_s + BOUND_S, self._start(known))

    def take(self, fetch: Fetch, index: int) -> bytearray | None:
        """Return block `index` of a fetch's text if it was read, else None. Starts further reads.

        The fetch ends (`Fetch.keys` is empty) if all was read, if a read has failed, or if it takes too long.
        """
        fetch.keys, fetch.first = fetch.keys[index - fetch.first :], index
        if fetch.keys and self.clock() > fetch.until_s:
            self._fail("blocks were not read in time", len(fetch.keys))
            self.read_s, fetch.keys = LATE * self.block_s, ()
        fetch.reads = self._start(fetch.keys)
        if not fetch.keys or not (read := fetch.reads[fetch.keys[0]]).done():
            return None
        data = read.result()
        if data is None:
            fetch.keys = ()
        else:
            self.saved_s += self.block_s - self.read_s
            self._count("tier_hits")
            self._count("tier_read_bytes", len(data))
        return data

    def keep(self, node: Node) -> None:
        """Write a node's block, unless the file has it, or too many jobs wait already."""
        if node.digest not in self._places and not self._put(WRITE, self._write, node.digest, node):
            self._count("tier_skipped")

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count the blocks of a text as used, the first one last: without it, the others cannot be used."""
        self._put(WRITE, self._touch, keys)  # after those of them that wait to be written

    def clear(self) -> None:
        """Remove all blocks from the file. A read that is queued from now on finds none."""
        self._put(READ, self._clear)

    # ------------------------------------------------------------------ jobs

    def _put(self, rank: int, function: Callable[..., None], *arguments: Any) -> bool:
        """Have the thread call a function; a lower rank goes first. Returns False if too many writes wait."""
        if rank == WRITE and self._jobs.qsize() >= MOST_JOBS:
            return False
        self._jobs.put((rank, next(self._numbers), functools.partial(function, *arguments)))
        return True

    def _start(self, keys: Sequence[bytes]) -> dict[bytes, Read]:
        """Return the reads of the first of these blocks. Fetches that wait for the same block share its read."""
        reads = {}
        for key in keys[:MOST_READS]:
            if (read := self._reads.get(key)) is None:
                self._reads[key] = read = Future()
                self._put(READ, self._read, key, read)
            reads[key] = read
        return reads

    def _count(self, name: str, number: int = 1) -> None:
        with self._counting:  # both threads count
            self.counters[name] += number

    def _fail(self, why: object, blocks: int = 1) -> None:
        if not self.counters["tier_failures"]:
            logger.warning("%s (further failures of the file are only counted)", why)
        self._count("tier_failures", blocks)

    # ------------------------------------------------------------------ the tier's own thread

    def work(self) -> None:
        """Do jobs, for ever. A thread calls this."""
        while job := self._jobs.get()[2]:  # None ends the thread
            try:
                job()
            except Exception as error:  # a full disk, a damaged block, …: the thread must go on
                self._fail(error)
            del job  # it may hold the last reference to a read

    def _read(self, key: bytes, read: Read) -> None:
        """Read a block. If that fails, forget the block: it is written again when it was computed."""
        data, began_s = None, time.perf_counter()
        try:
            if key in self._places:  # else it was evicted meanwhile
                data = self._file.read(self._places[key], key)
                took_s = time.perf_counter() - began_s
                self.read_s = 0.8 * self.read_s + 0.2 * took_s if self.read_s else took_s
        except Exception:
            self._free.append(self._places.pop(key))
            raise
        finally:
            read.set_result(data)

    def _write(self, key: bytes, node: Node) -> None:
        if key in self._places:
            return
        data = self._load(node)
        if data is None:  # before a place is taken: such a block must push no other one out of the file
            self._count("tier_skipped")
            return
        place = self._free.pop() if self._free else self._places.popitem(last=False)[1]
        try:
            self._file.write(place, key, data)
        except Exception:
            self._free.append(place)
            raise
        self._places[key] = place
        self._count("tier_written_bytes", len(data))

    def _touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if key in self._places:
                self._places.move_to_end(key)

    def _clear(self) -> None:
        self._places.clear()
        self._free = list(range(self._file.places))
        self._file.clear()
