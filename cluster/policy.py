"""Routing policies: choose a replica by the replicas' loads and a prompt's keys. They use neither Ray nor a clock.

```text
load of a replica = waiting / seats + max(active / seats, KV use)

  0      idle            1      every seat or all KV memory is taken      2      a batch more waits
  ├───────────────────────┼───────────────────────────────────────────────┼──────────────────────>
  a  0.25                          b  1.5

  least_loaded     a
  prefix           b, if it holds more of the prompt than a, and 1.5 is at most 0.25 + margin; else a
```

A request count would say less: an engine whose few requests have filled its memory is busier than an engine whose
many requests are short.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

BLOCK_BYTES = 64  # bytes of a prompt for one key: about a KV block of 16 tokens
MAX_BLOCKS = 256  # most blocks of a prompt with keys; prompts that differ only later get the same keys


@dataclass(frozen=True, slots=True)
class Load:
    """The load that an engine reports.

    Attributes:
        seats: sequences that the engine computes together.
        active: requests that hold KV memory.
        waiting: requests in its queue.
        queue_room: how many more requests it accepts, for its free seats and its queue.
        kv_use: share of its KV memory that is held, 0 to 1.
    """

    seats: int
    active: int = 0
    waiting: int = 0
    queue_room: int = 1
    kv_use: float = 0.0

    @property
    def is_full(self) -> bool:
        """Whether one more request would be refused."""
        return self.queue_room <= 0

    @property
    def value(self) -> float:
        """The load as one number: 0 is idle, 1 a full batch or full KV memory, and each waiting batch adds 1."""
        return self.waiting / self.seats + max(self.active / self.seats, self.kv_use)

    def plus(self, requests: int) -> Load:
        """Return the load after `requests` more requests have come, or after some have left if the number is
        negative.

        New requests take the free seats first, and the others wait, as in an engine. If requests wait already
        although seats are free, they wait for memory. Then all new requests wait, too.
        """
        if requests < 0:
            queued = -min(-requests, self.waiting)
            seated = max(requests - queued, -self.active)
        else:
            seated = 0 if self.waiting else min(requests, max(self.seats - self.active, 0))
            queued = requests - seated
        return replace(
            self,
            active=self.active + seated,
            waiting=self.waiting + queued,
            queue_room=self.queue_room - seated - queued,
        )


class LoadTable:
    """The loads of all replicas: the last report of each, and how many requests the router has sent since.

    A report is old when it arrives. If requests sent since were not counted, a whole burst would go to one idle
    replica.
    """

    def __init__(self) -> None:
        # For each replica, the number of its latest report, and the load that it reported.
        self._reports: dict[str, tuple[int, Load]] = {}
        self._since: Counter[str] = Counter()  # requests begun since that report, less those that have ended

    def report(self, replica: str, load: Load, number: int) -> None:
        """Store a replica's report, unless `number` is that of its stored report: then it is the same report."""
        if replica not in self._reports or number != self._reports[replica][0]:
            self._reports[replica] = number, load
            self._since[replica] = 0

    def count(self, replica: str, requests: int) -> None:
        """Count a request that is sent to this replica now (1) or that has ended (-1)."""
        self._since[replica] += requests

    def keep(self, replicas: Collection[str]) -> None:
        """Forget all replicas except `replicas`."""
        for gone in {*self._reports, *self._since} - {*replicas}:
            self._reports.pop(gone, None)
            self._since.pop(gone)

    def load(self, replica: str) -> Load:
        """Return the estimated load. A replica without a report has only the requests that were sent to it."""
        since = self._since[replica]
        if replica not in self._reports:
            return Load(seats=1, queue_room=since + 1).plus(since)
        return self._reports[replica][1].plus(since)


# ---------------------------------------------------------------------- policies


class Policy(ABC):
    """Chooses among replicas. A full replica is chosen only if all are full.

    The same seed and the same calls give the same choices.
    """

    name: str

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    @abstractmethod
    def choose(self, keys: Sequence[int], loads: Mapping[str, Load]) -> str:
        """Choose the replica for a prompt, and remember the choice if the policy needs it.

        Args:
            keys: keys of the prompt's beginning (`prefix_keys`).
            loads: loads of the replicas to choose among, at least one.
        """

    def forget(self, replica: str) -> None:  # noqa: B027 - most remember nothing
        """Forget a replica that is gone."""

    def _least_loaded(self, loads: Mapping[str, Load]) -> str:
        """Return a replica with the smallest load, drawn at random among equals: several routers should not all
        choose the first one."""
        values = {replica: (load.is_full, load.value) for replica, load in loads.items()}
        least = min(values.values())
        return self._random.choice([replica for replica, value in values.items() if value == least])


class Random(Policy):
    """Chooses a random replica: the baseline for the other policies."""

    name = "random"

    def choose(self, keys: Sequence[int], loads: Mapping[str, Load]) -> str:  # noqa: ARG002 - one signature
        return self._random.choice(_with_room(loads))


class RoundRobin(Policy):
    """Chooses replicas in turn, in the order of their names."""

    name = "round_robin"

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._last = ""

    def choose(self, keys: Sequence[int], loads: Mapping[str, Load]) -> str:  # noqa: ARG002 - one signature
        names = sorted(_with_room(loads))
        self._last = next((name for name in names if name > self._last), names[0])
        return self._last


class LeastLoaded(Policy):
    """Chooses the replica with the smallest load, or a random one of several with this load."""

    name = "least_loaded"

    def choose(self, keys: Sequence[int], loads: Mapping[str, Load]) -> str:  # noqa: ARG002 - one signature
        return self._least_loaded(loads)


class Prefix(Policy):
    """Chooses the replica that was sent the longest beginning of the prompt, and so may have it in its cache.

    That is a guess: the replica may have evicted the blocks, and then they are computed again. Among replicas that
    were sent equally long beginnings, the least loaded one is chosen. SGLang's router and Ray's keep the texts in
    trees; here a table of hashes has a bounded number of entries.

    Args:
        margin: in batches. A replica whose load exceeds the least load by more than this is not considered.
        capacity: most keys in the table.
    """

    name = "prefix"

    def __init__(self, seed: int = 0, *, margin: float = 0.5, capacity: int = 1 << 18) -> None:
        super().__init__(seed)
        self.margin = margin
        self.holders = HolderTable(capacity)

    def choose(self, keys: Sequence[int], loads: Mapping[str, Load]) -> str:
        names = _with_room(loads)
        limit = min(loads[name].value for name in names) + self.margin
        near = {name: loads[name] for name in names if loads[name].value <= limit}
        holding = self.holders.longest(keys, near)
        chosen = self._least_loaded({name: near[name] for name in holding})
        self.holders.add(keys, chosen)
        return chosen

    def forget(self, replica: str) -> None:
        self.holders.forget(replica)


POLICIES: dict[str, type[Policy]] = {each.name: each for each in (Prefix, LeastLoaded, RoundRobin, Random)}


def _with_room(loads: Mapping[str, Load]) -> list[str]:
    """Return the replicas that are not full; all replicas if all are full."""
    return [name for name, load in loads.items() if not load.is_full] or list(loads)


# ---------------------------------------------------------------------- prefixes


def prefix_keys(prompt: bytes, salt: bytes = b"", *, block_bytes: int = BLOCK_BYTES) -> list[int]:
    """Return a key for each of a prompt's first `MAX_BLOCKS` whole blocks: a hash of the prompt to the block's end.

    ```text
    prompt   You are a friendly │ assistant. User: W │ hat is a ra
    keys     h(salt, block 0)     h(key 0, block 1)    none: the block is not whole
    ```

    Two prompts with the same salt share a key for each whole block that they share from the beginning, up to
    `MAX_BLOCKS`. Different beginnings have the same key with probability 2⁻⁶⁴. That is harmless: the replica's
    cache compares token ids.
    """
    keys: list[int] = []
    digest = hashlib.blake2b(salt, digest_size=8).digest()
    for end in range(block_bytes, min(len(prompt), MAX_BLOCKS * block_bytes) + 1, block_bytes):
        digest = hashlib.blake2b(digest + prompt[end - block_bytes : end], digest_size=8).digest()
        keys.append(int.from_bytes(digest, "little"))
    return keys


class HolderTable:
    """Records to which replicas prompts with each key were sent. The least recently used keys are forgotten first.

    Args:
        capacity: the largest number of keys.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._holders: OrderedDict[int, set[str]] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._holders)

    def longest(self, keys: Iterable[int], replicas: Collection[str]) -> list[str]:
        """Return the replicas among `replicas` that were sent the longest beginning of `keys`.

        If no replica was sent the first key, returns all replicas.
        """
        best = list(replicas)
        for key in keys:
            holders = self._holders.get(key, ())
            longer = [replica for replica in best if replica in holders]
            if not longer:
                break
            best = longer
        return best

    def add(self, keys: Sequence[int], replica: str) -> None:
        """Record that a prompt with these keys was sent to a replica. Drops old keys beyond the capacity."""
        # Reversed, so that the first key ends as the most recently used: a later key is useless without it.
        for key in reversed(keys):
            self._holders.setdefault(key, set()).add(replica)
            self._holders.move_to_end(key)
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)

    def forget(self, replica: str) -> None:
        """Remove a replica, which is gone, and the keys that only it has."""
        for key, holders in list(self._holders.items()):
            holders.discard(replica)
            if not holders:
                del self._holders[key]
