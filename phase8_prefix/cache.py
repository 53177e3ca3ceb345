"""A pool that keeps blocks after their sequences end, for sequences with the same prefix.

```text
block size 4                     table     columns  0 1 2 3  4 5 6 7  8 9
  A  tokens 0-9                  5 0 7              block 5  block 0  block 7     5 and 0 are in the tree
  B  begins like A, tokens 0-8   5 0 3              block 5  block 0  block 3     B computes column 8 only
```

A full block enters the prefix tree (`phase8_prefix.tree`) if its keys and values are finite. As long as it is
in the tree, it is not written. A block that no sequence uses stays in the tree until it is evicted.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch

from common.kv import KVPool, KVShape
from common.request import Request
from phase6_paged.allocator import BlockAllocator
from phase6_paged.cache import PagedKVCachePool
from phase6_paged.cache import open_pool as open_paged_pool
from phase8_prefix.config import Config
from phase8_prefix.tree import Node, PrefixTree

logger = logging.getLogger(__name__)

CACHE = -1  # the owner of the tree's blocks; no slot has this number


class CachingAllocator(BlockAllocator[int]):
    """Counts the prefix tree's blocks without users as free, too, and evicts them when they are needed."""

    def __init__(self, num_blocks: int, tree: PrefixTree) -> None:
        super().__init__(num_blocks)
        self.tree = tree
        self.evictions = 0  # blocks evicted by `allocate` since the start

    @property
    def num_free(self) -> int:
        return super().num_free + self.tree.evictable_count()

    @property
    def num_allocated(self) -> int:
        return super().num_allocated - self.tree.evictable_count()

    def allocate(self, count: int, owner: int) -> list[int]:
        if self.can_allocate(count):
            self.evictions += self.force_free(self.tree.evict(count - super().num_free))
        return super().allocate(count, owner)

    def hand_over(self, blocks: Iterable[int]) -> None:
        """Make the prefix tree the owner of these blocks."""
        self._owners |= dict.fromkeys(blocks, CACHE)


class PrefixCachingPool(PagedKVCachePool):
    """Phase 6's pool, with a prefix tree of its full blocks."""

    def __init__(self, config: Config, shape: KVShape, device: torch.device) -> None:
        super().__init__(config, shape, device)
        self.tree = PrefixTree(config.block_size)
        self.allocator: CachingAllocator = CachingAllocator(config.resolve_num_blocks(), self.tree)
        # Slot -> nodes it holds. If another slot registered the same text first, the slot keeps its own blocks.
        self._paths: defaultdict[int, list[Node]] = defaultdict(list)
        self._looked: dict[int, int] = {}  # slot -> `tree.insertions` at its latest search for hits

    def cost(self, request: Request, tokens: int) -> int:
        """Return how many free columns `tokens` tokens of a request without memory would take.

        New blocks take free columns. So do hits on blocks that no sequence uses, since these blocks count as
        free. Hits on blocks in use take none.
        """
        in_use = sum(node.users > 0 for node in self._match(request, ()))
        return super().cost(request, tokens) - in_use * self.block_size

    def match_prefix(self, request: Request) -> None:
        slot = request.slot
        assert slot is not None
        if self._looked.get(slot) == self.tree.insertions:
            return
        self._looked[slot] = self.tree.insertions
        path, table = self._paths[slot], self._tables[slot]
        hits = self._match(request, path)
        found = slice(len(path), len(path) + len(hits))
        self.tree.hold(hits)
        path += hits
        self.allocator.free(table[found])  # blocks reserved before these hits existed
        table[found] = [node.block for node in hits]
        self._rows.write(self._seats[slot], found.start, table[found])
        self._start_after_path(request, slot)

    def _start_after_path(self, request: Request, slot: int) -> None:
        self._lengths[slot] = len(self._paths[slot]) * self.block_size
        request.start_after(self._lengths[slot])

    def _match(self, request: Request, held: Sequence[Node]) -> list[Node]:
        """Return the tree's nodes for a request's prefix, without the nodes `held` at its beginning.

        The last token's block is never a hit, since that token must be computed. A request with
        `prompt_logprobs` has no hits.
        """
        if request.params.prompt_logprobs is not None:
            return []  # each token's log-probability must be computed
        limit = (len(request.token_ids) - 1) // self.block_size
        return self.tree.match(request.token_ids, request.cache_salt, held)[: limit - len(held)]

    def register_prefix(self, request: Request, columns: int) -> None:
        """Insert the full blocks of a request's first `columns` columns into the tree, as far as the columns
        have been computed.

        Blocks that the request inserted or found before are left out. If a key or a value in the remaining
        blocks is not finite, none of these blocks is inserted.
        """
        slot = request.slot
        assert slot is not None
        path = self._paths[slot]
        full = min(columns, self.get_seq_len(slot)) // self.block_size
        blocks = self._tables[slot][len(path) : full]
        if blocks and self._are_finite(blocks):
            self._insert(request, blocks)

    def _insert(self, request: Request, blocks: Sequence[int]) -> list[Node]:
        """Insert the blocks that follow a request's path into the tree, and into the path. Returns their nodes."""
        assert request.slot is not None
        path = self._paths[request.slot]
        nodes = self.tree.insert(request.token_ids, blocks, request.cache_salt, path)
        path += nodes
        self.allocator.hand_over(node.block for node in nodes)
        return nodes

    def _are_finite(self, blocks: Sequence[int]) -> bool:
        """Return whether the last layer's keys and values in these blocks are finite; False if that is unknown.

        It is unknown if memory is too short to check. The last layer stands for all layers: a NaN, or an
        infinite value, in an earlier layer spreads through its column's own attention to the last layer. So
        does an infinite key, unless its own query gives it a weight of 0.
        """
        try:
            bounds = [torch.aminmax(store[i]) for store in (self.k[-1], self.v[-1]) for i in blocks]
            return bool(torch.stack([bound for pair in bounds for bound in pair]).isfinite().all())
        except torch.OutOfMemoryError:
            logger.warning("out of memory while a prefix was looked at: it is not shared")
            return False

    def release(self, request: Request) -> None:
        """Free the request's memory, except for full blocks that are in the tree or can enter it
        (`register_prefix`): the tree keeps these until they are evicted.

        Full blocks of generated tokens are kept too: a chat's next prompt begins with them. The latest token
        is left out, since its key and value may not have been computed.
        """
        if request.slot is not None:
            self.register_prefix(request, len(request.token_ids) - 1)
        super().release(request)

    def free_slot(self, slot: int) -> None:
        path = self._paths.pop(slot, [])
        self._looked.pop(slot, None)
        shared = {node.block for node in path}
        self._tables[slot] = [block for block in self._tables[slot] if block not in shared]
        super().free_slot(slot)
        self.tree.release(path)

    def clear(self) -> None:
        super().clear()
        self.tree.clear()
        self._paths.clear()
        self._looked.clear()

    @property
    def used_tokens(self) -> int:
        """Number of reserved columns that hold a token. The columns of a shared block count once."""
        in_tables = sum(map(len, self._tables.values())) * self.block_size
        return self.reserved_tokens - (in_tables - sum(self._lengths.values()))

    def kept_blocks(self) -> Sequence[int]:
        return self.tree.unused_blocks()

    def counts(self) -> Mapping[str, float]:
        return {"evictions": self.allocator.evictions}

    def reset_prefix_cache(self) -> int:
        return self.allocator.force_free(self.tree.evict(self.tree.evictable_count()))

    def audit_blocks(self) -> set[int]:
        return super().audit_blocks() - {node.block for _, node in self.tree.walk()}


def open_pool(config: Config, shape: KVShape, device: torch.device) -> KVPool:
    """Return a new pool with a prefix cache, or phase 6's pool if `enable_prefix_caching` is off."""
    pool = PrefixCachingPool if config.enable_prefix_caching else open_paged_pool
    return pool(config, shape, device)
