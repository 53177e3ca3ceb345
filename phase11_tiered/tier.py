"""Moves blocks between the pool and a file in a thread, and decides which reads are worth their time.

```text
engine's thread   keep(block) ─> waiting writes ┐                       ┌─> take: blocks for the pool
                  fetch(keys) ─> waiting reads ─┴─> thread ─> file ─> ready
```

One thread does all reading and writing, reads first. It holds no lock while the disk works, so the engine never
waits for the disk. If a read takes too long or fails, the request's blocks are computed instead.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from phase8_prefix.tree import Node
from phase11_tiered.block_file import BlockFile

logger = logging.getLogger(__name__)

MOST_WRITES = 4096  # waiting writes; while there are so many, further blocks are not written
MOST_READY = 32  # blocks that are read and not taken yet, of one fetch: they take memory beside the pool
LATENCY_S = 0.005  # of a fetch, beside the time of its reads: blocks are taken between two steps
FORGETTING = 0.9  # factor on the measured time of a read whenever reads are declined
BOUND_S = 0.5  # how much longer than computing its blocks a fetch may take before it is dropped


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks that are read for one request."""

    first: int  # index of the first block in the request's text
    keys: Sequence[bytes]
    block_s: float  # seconds that computing one block would take
    began_s: float = field(default_factory=time.monotonic)
    next: int = 0  # number of blocks that were read, or need not be read any more
    taken: int = 0  # number of blocks that the pool has taken
    ready: list[tuple[int, bytes]] = field(default_factory=list)  # read and not taken, with their indices
    done: bool = False  # the pool has taken all that it gets


class Tier:
    """The blocks in a file: finds them by their keys, reads and writes them in a thread, and evicts old ones.

    The least recently used block is evicted first. If a block is used, so are the blocks before it, and these count
    as used later. So no block is evicted before the blocks that follow it.

    Args:
        file: the file; `close` closes it.
        load: returns the bytes of a node's block in the pool; None if the node has left the tree. The thread calls
            it.
    """

    def __init__(self, file: BlockFile, load: Callable[[Node], bytes | None]) -> None:
        self.counters: Counter[str] = Counter()  # see `telemetry.Counters`
        self.saved_s = 0.0  # time to compute what was read, minus the time of reading
        self.read_s = 0.0  # seconds of a block's read, a moving average; 0: none was read
        self._file, self._load = file, load
        # Key -> place, parent; the block that was used the longest ago comes first.
        self._places: OrderedDict[bytes, tuple[int, bytes]] = OrderedDict()
        self._written = 0  # number of the latest write
        for place, header in sorted(file.headers(), key=lambda each: each[1].written):
            self._add(header.key, header.parent, place)
            self._written = header.written
        used = {place for place, _ in self._places.values()}
        self._free = [place for place in range(file.places) if place not in used]
        self._writes: OrderedDict[bytes, tuple[bytes, Node]] = OrderedDict()  # key -> parent, node
        self._fetches: list[Fetch] = []
        self._clearing = self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kv-tier", daemon=True)
        self._thread.start()
        logger.info("%s holds %d of at most %d blocks", file.path, len(self._places), file.places)

    # ------------------------------------------------------------------ for the engine's thread

    def fetch(self, keys: Sequence[bytes], first: int, block_s: float) -> Fetch | None:
        """Begin to read the first of these blocks, as many as the file has. None: it has none, or computing them
        takes less time."""
        with self._changed:
            known = next((i for i, key in enumerate(keys) if key not in self._places), len(keys))
            if known == 0 or self._clearing:
                return None
            before = sum(len(each.keys) - each.next for each in self._fetches)
            if (before + known) * self.read_s + LATENCY_S > known * block_s:
                self.counters["tier_declined"] += known
                self.read_s *= FORGETTING
                return None
            self._fetches.append(fetch := Fetch(first, keys[:known], block_s))
            self._changed.notify_all()
            return fetch

    def take(self, fetch: Fetch, held: int) -> list[tuple[int, bytes]]:
        """Return the blocks of a fetch that were read since the last call, each with its index in the text.

        Blocks before the index `held` are not needed any more. The fetch is done if all was read, if a block is
        missing, if reading has become slower than computing, or if the fetch is late.
        """
        with self._changed:
            ready = [each for each in fetch.ready if each[0] >= held]
            fetch.ready.clear()
            fetch.taken += len(ready)
            fetch.next = max(fetch.next, min(held - fetch.first, len(fetch.keys)))
            left, waited_s = len(fetch.keys) - fetch.next, time.monotonic() - fetch.began_s
            is_late = waited_s > len(fetch.keys) * fetch.block_s + BOUND_S
            if fetch in self._fetches and (not left or is_late or self.read_s > fetch.block_s):
                self.counters["tier_failures" if is_late else "tier_declined"] += left
                self._fetches.remove(fetch)
                if is_late:
                    self.read_s = max(self.read_s, waited_s / (fetch.taken + 1))
            fetch.done = fetch not in self._fetches
            if fetch.done:
                self.counters["tier_hits"] += fetch.taken
                self.saved_s += fetch.taken * fetch.block_s - waited_s
            self._changed.notify_all()
            return ready

    def drop(self, fetch: Fetch) -> None:
        """Read nothing more of a fetch."""
        with self._changed:
            if fetch in self._fetches:
                self._fetches.remove(fetch)

    def keep(self, key: bytes, parent: bytes, node: Node) -> None:
        """Write a node's block, unless the file has it, or too many writes wait already."""
        with self._changed:
            if key in self._places:
                return
            if len(self._writes) < MOST_WRITES:
                self._writes.setdefault(key, (parent, node))
                self._changed.notify_all()
            else:
                self.counters["tier_skipped"] += 1

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count the blocks of a text as used now, if the file has them."""
        with self._changed:
            for key in reversed(keys):
                if key in self._places:
                    self._places.move_to_end(key)

    def wait(self, timeout_s: float) -> None:
        """If blocks are being read, wait until the first of them is ready, or until something else has happened."""
        with self._changed:
            if self._fetches and not any(each.ready for each in self._fetches):
                self._changed.wait(timeout_s)

    def forget_waiting(self) -> None:
        """Drop all reads and writes that wait."""
        with self._changed:
            self._writes.clear()
            self._fetches.clear()

    def clear(self) -> None:
        """Remove all blocks from the file, and drop what waits."""
        with self._changed:
            self.forget_waiting()
            self._clearing = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread after its present read or write, and close the file."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._file.close()

    # ------------------------------------------------------------------ the tier's own thread

    def _run(self) -> None:
        while work := self._next():
            try:
                work()
            except Exception as error:  # a full disk, a damaged block, …: the thread must go on
                with self._changed:
                    if not self.counters["tier_failures"]:
                        logger.warning("%s (further failures of the file are only counted)", error)
                    self.counters["tier_failures"] += 1

    def _next(self) -> Callable[[], None] | None:
        """Wait for something to do, and return it; None: the tier is closed."""
        with self._changed:
            while not self._closing:
                if self._clearing:
                    return self._clear
                for fetch in self._fetches:
                    if len(fetch.ready) < MOST_READY:
                        key = fetch.keys[fetch.next]
                        return functools.partial(self._read, fetch, fetch.next, key, self._places.get(key))
                for key, (parent, node) in self._writes.items():
                    return functools.partial(self._write, key, parent, node)
                self._changed.wait()
        return None

    def _read(self, fetch: Fetch, index: int, key: bytes, entry: tuple[int, bytes] | None) -> None:
        """Read a fetch's block `index`. If that fails, forget the block, and read nothing more of the fetch."""
        data, began_s = None, time.perf_counter()
        try:
            if entry is not None:  # else it was evicted meanwhile
                data = self._file.read(entry[0], key)
        finally:
            took_s = time.perf_counter() - began_s
            with self._changed:
                if data is not None:
                    self.read_s = 0.8 * self.read_s + 0.2 * took_s if self.read_s else took_s
                    self.counters["tier_read_bytes"] += len(data)
                    fetch.ready.append((fetch.first + index, data))
                    fetch.next = max(fetch.next, index + 1)
                elif entry is not None:
                    del self._places[key]
                    self._free.append(entry[0])
                if fetch in self._fetches and (data is None or fetch.next == len(fetch.keys)):
                    self._fetches.remove(fetch)
                self._changed.notify_all()

    def _write(self, key: bytes, parent: bytes, node: Node) -> None:
        try:
            # Before a place is taken: a block that has left the tree must push no other block out of the file.
            if (data := self._load(node)) is None:
                self.counters["tier_skipped"] += 1
                return
            with self._changed:
                place = self._free.pop() if self._free else self._places.popitem(last=False)[1][0]
            try:
                self._file.write(place, key, parent, self._written + 1, data)
            except Exception:
                self._free.append(place)
                raise
            with self._changed:
                self._written += 1
                self.counters["tier_written_bytes"] += len(data)
                self._add(key, parent, place)
        finally:
            with self._changed:
                self._writes.pop(key, None)

    def _clear(self) -> None:
        try:
            self._file.clear()
        finally:
            with self._changed:
                self._places.clear()
                self._free = list(range(self._file.places))
                self._clearing = False

    def _add(self, key: bytes, parent: bytes, place: int) -> None:
        """Add a block to the index. It and the blocks before it count as used now."""
        self._places[key] = place, parent
        while key in self._places:
            self._places.move_to_end(key)
            key = self._places[key][1]
