"""Phase 8's pool, with a file below it: blocks of the prefix tree are written to the file, and read from it again.

```text
                        memory (the tree)          file
  registered            written in both            ─> by the tier's thread, while the block is in the tree
  evicted               gone                       still there
  a prompt comes        hits                       further hits: read into the blocks that the request has reserved
  the server restarts   empty                      still there
```
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Callable, Mapping

import numpy as np
import torch

from common.kv import KVPool, KVShape
from common.request import Request
from phase8_prefix.cache import PrefixCachingPool
from phase8_prefix.cache import open_pool as open_prefix_pool
from phase8_prefix.tree import Node
from phase11_tiered.block_file import BlockFile
from phase11_tiered.config import Config
from phase11_tiered.tier import Fetch, Tier

logger = logging.getLogger(__name__)


class TieredPool(PrefixCachingPool):
    """Phase 8's pool. It is that and no more until `open_tier` is called.

    Attributes:
        tier: the blocks in the file; None: there is no file.
    """

    tier: Tier | None = None

    def open_tier(self, config: Config, fingerprint: bytes, token_s: Callable[[], float]) -> None:
        """Open the file of blocks. If that fails, log why, and go on without it.

        Args:
            config: its `kv_tier` must not be None.
            fingerprint: 32 bytes, of everything that a block's numbers depend on beside its tokens.
            token_s: returns the seconds that computing a token of a prompt takes.
        """
        assert config.kv_tier is not None
        self._fingerprint, self._token_s = fingerprint, token_s
        self._keys: dict[
            int, list[bytes]
        ] = {}  # slot -> keys of its text's blocks, after that of the empty text
        self._fetches: dict[int, Fetch | None] = {}  # slot -> its fetch; None: the file had nothing for it
        block_bytes = self.block_size * self.shape.bytes_per_token
        try:
            file = BlockFile.open(config.kv_tier, fingerprint.hex()[:16], block_bytes, config.kv_tier_bytes)
            self.tier = Tier(file, self._load)
        except (OSError, ValueError) as error:
            logger.warning("no blocks are kept in %s: %s", config.kv_tier, error)

    # ------------------------------------------------------------------ hits

    def match_prefix(self, request: Request) -> None:
        """Find the prefix in memory, and read what follows from the file.

        While blocks are read (`Request.fetching`), each call takes the blocks that have come.
        """
        super().match_prefix(request)
        slot = request.slot
        assert slot is not None
        if self.tier is None:
            return
        if slot not in self._fetches:  # at admission, before the request has blocks for what is read
            self._fetches[slot] = self._fetch(request)
            request.fetching = self._fetches[slot] is not None
            return
        fetch, path, table = self._fetches[slot], self._paths[slot], self._tables[slot]
        if fetch is None or fetch.done:
            return
        for index, data in self.tier.take(fetch, held=len(path)):
            if index == len(path):
                self._store(table[index], data)
                path += self.tree.insert(request.token_ids, [table[index]], request.cache_salt, path)
                self.allocator.hand_over([table[index]])
        self._lengths[slot] = len(path) * self.block_size
        request.start_after(len(path) * self.block_size)
        request.fetching = not fetch.done

    def _fetch(self, request: Request) -> Fetch | None:
        """Begin to read the blocks that follow a request's hits in memory, except for the last token's."""
        if request.params.prompt_logprobs is not None:
            return None  # each token's log-probability must be computed
        assert request.slot is not None
        assert self.tier is not None
        held, last = len(self._paths[request.slot]), (len(request.token_ids) - 1) // self.block_size
        keys = self._keys_of(request, last)
        return self.tier.fetch(keys[held + 1 :], held, self.block_size * self._token_s())

    def _keys_of(self, request: Request, blocks: int) -> list[bytes]:
        """Return the keys of at least the first `blocks` blocks of a request's text, after that of the empty text.

        A key is a hash of the key before and the block's tokens. So equal keys mean equal texts, under the same
        salt and fingerprint.
        """
        assert request.slot is not None
        keys, size = self._keys.setdefault(request.slot, []), self.block_size
        if not keys:
            keys.append(_digest(self._fingerprint + request.cache_salt.encode()))
        for first in range((len(keys) - 1) * size, blocks * size, size):
            keys.append(_digest(keys[-1] + array("I", request.token_ids[first : first + size]).tobytes()))
        return keys

    # ------------------------------------------------------------------ blocks that come and go

    def register_prefix(self, request: Request, columns: int) -> None:
        slot = request.slot
        assert slot is not None
        path = self._paths[slot]
        known = len(path)
        super().register_prefix(request, columns)
        if self.tier is not None:
            keys = self._keys_of(request, len(path))
            for index, node in enumerate(path[known:], known):
                self.tier.keep(keys[index + 1], keys[index], node)

    def release(self, request: Request) -> None:
        super().release(request)
        request.fetching = False

    def free_slot(self, slot: int) -> None:
        if self.tier is not None:
            self.tier.touch(self._keys.pop(slot, [])[1:])
            if fetch := self._fetches.pop(slot, None):
                self.tier.drop(fetch)
        super().free_slot(slot)

    def clear(self) -> None:
        super().clear()
        if self.tier is not None:
            self.tier.forget_waiting()
            self._keys.clear()
            self._fetches.clear()

    def reset_prefix_cache(self) -> int:
        if self.tier is not None:
            self.tier.clear()
        return super().reset_prefix_cache()

    def counts(self) -> Mapping[str, float]:
        if self.tier is None:
            return super().counts()
        return {**super().counts(), **self.tier.counters, "tier_saved_s": self.tier.saved_s}

    # ------------------------------------------------------------------ bytes

    def _load(self, node: Node) -> bytes | None:
        """Return a node's keys and values, layer by layer; None: the node has left the tree.

        The tier's thread calls. A block is not written while it is in the tree. So if the node is still there after
        its block was read, what was read is right.
        """
        block = node.block
        stores = [*self.k, *self.v]
        if self.device.type == "cpu":  # without torch: it would start threads of its own for this thread
            data = b"".join(
                [store.view(len(store), -1)[block].view(torch.uint8).numpy().data for store in stores]
            )
        else:
            data = (
                torch.cat([store[block].view(-1) for store in stores])
                .view(torch.uint8)
                .cpu()
                .numpy()
                .tobytes()
            )
        return None if node.parent is None else data

    def _store(self, block: int, data: bytes) -> None:
        """Write keys and values into a block that no pass uses."""
        stores = [*self.k, *self.v]
        for store, part in zip(stores, np.frombuffer(data, np.uint8).reshape(len(stores), -1), strict=True):
            rows = store.view(len(store), -1)[block].view(torch.uint8)
            if self.device.type == "cpu":
                rows.numpy()[:] = part
            else:
                rows.copy_(torch.from_numpy(part.copy()))


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=32).digest()


def open_pool(config: Config, shape: KVShape, device: torch.device) -> KVPool:
    """Return a new pool that can have a tier, or phase 8's pool if `enable_prefix_caching` is off."""
    return (TieredPool if config.enable_prefix_caching else open_prefix_pool)(config, shape, device)
