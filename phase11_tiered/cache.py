"""Phase 8's pool, with a file below it: blocks of the prefix tree are written to it, and read from it again."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from common.kv import KVPool, KVShape
from common.request import Request
from phase8_prefix.cache import PrefixCachingPool
from phase8_prefix.cache import open_pool as open_prefix_pool
from phase8_prefix.tree import Key, Node
from phase11_tiered.block_file import BlockFile
from phase11_tiered.config import Config
from phase11_tiered.tier import Tier

logger = logging.getLogger(__name__)


def digest_of(before: bytes, key: Key) -> bytes:
    """Return the name of a block in the file: 32 bytes, a hash of the name of the block before it and of its tokens
    (`PrefixTree.keys`). The first block of a text comes after the model's fingerprint, and its key has the salt."""
    return hashlib.blake2b(before + repr(key).encode(), digest_size=32).digest()


class TieredPool(PrefixCachingPool):
    """Phase 8's pool. It is that and no more until `open_tier` is called.

    Attributes:
        tier: the blocks in the file; None: there is no file.
    """

    def __init__(self, config: Config, shape: KVShape, device: torch.device) -> None:
        super().__init__(config, shape, device)
        self.tier: Tier | None = None
        self._fetches: dict[int, Iterator[bytearray | None]] = {}  # slot -> the blocks that are read for it

    def open_tier(self, config: Config, fingerprint: bytes, token_s: float) -> None:
        """Open the file of blocks. If that fails, log why, and go on without it.

        Args:
            config: its `kv_tier` must not be None.
            fingerprint: 32 bytes, of everything that a block's numbers depend on beside its text.
            token_s: seconds that computing a token of a prompt takes.
        """
        assert config.kv_tier is not None
        self.tree.root.digest = fingerprint
        name, block_bytes = fingerprint.hex()[:16], self.block_size * self.shape.bytes_per_token
        try:
            file = BlockFile(config.kv_tier, name, block_bytes, config.kv_tier_bytes)
        except (OSError, ValueError) as error:
            logger.warning("no blocks are kept in %s: %s", config.kv_tier, error)
        else:
            self.tier = Tier(file, self.load, self.block_size * token_s)
            logger.info("%s holds %d of at most %d blocks", file.path, *self.tier.size)

    def match_prefix(self, request: Request) -> None:
        """Find the prefix in memory, and read what follows from the file.

        While blocks are read (`Request.fetching`), each call takes the blocks that have come.
        """
        super().match_prefix(request)
        slot = request.slot
        assert slot is not None
        if self.tier is None or request.params.prompt_logprobs is not None:
            return  # each token's log-probability must be computed
        path, table = self._paths[slot], self._tables[slot]
        if slot not in self._fetches:
            self._fetches[slot] = self.tier.read(self._digests(request, path), path)
        request.fetching = False
        for data in self._fetches[slot]:
            if data is None:
                request.fetching = True
                break
            block = table[len(path)]
            self._store(block, data)
            self._insert(request, [block])
        self._start_after_path(request, slot)

    def _digests(self, request: Request, path: Sequence[Node]) -> Iterator[bytes]:
        """Yield the digests of the blocks after a path, except for the last token's block."""
        digest = path[-1].digest if path else self.tree.root.digest
        for key in self.tree.keys(request.token_ids[:-1], request.cache_salt, len(path)):
            digest = digest_of(digest, key)
            yield digest

    def _insert(self, request: Request, blocks: Sequence[int]) -> list[Node]:
        nodes = super()._insert(request, blocks)
        if self.tier is not None:
            for node in nodes:
                assert node.parent is not None
                node.digest = digest_of(node.parent.digest, node.key)
            self.tier.keep(nodes)
        return nodes

    def free_slot(self, slot: int) -> None:
        if self.tier is not None:
            self.tier.touch(self._paths[slot])
        self._fetches.pop(slot, None)
        super().free_slot(slot)

    def clear(self) -> None:
        super().clear()
        self._fetches.clear()

    def reset_prefix_cache(self) -> int:
        if self.tier is not None:
            self.tier.clear()
        return super().reset_prefix_cache()

    def disk_blocks(self) -> tuple[int, int]:
        return (0, 0) if self.tier is None else self.tier.size

    def counts(self) -> Mapping[str, float]:
        return super().counts() if self.tier is None else {**super().counts(), **self.tier.counts()}

    def load(self, blocks: Sequence[int]) -> list[memoryview]:
        """Return a copy of each block's bytes: keys, then values, each [layers, block_size, kv_heads, head_dim]."""
        if not blocks:
            return []
        places, stores = blocks, [*self.k, *self.v]
        if self.device.type == "cuda":
            ids = torch.tensor(blocks, device=self.device)
            places, stores = range(len(blocks)), [store[ids].cpu() for store in stores]
        # numpy copies once, and takes less than half the time of torch's gathering and stacking.
        arrays = [store.view(torch.uint8).numpy() for store in stores]
        return [np.concatenate([array[place] for array in arrays]).reshape(-1).data for place in places]

    def _store(self, block: int, data: bytearray) -> None:
        """Write what `load` returned into a block that no pass uses."""
        stores = (*self.k, *self.v)
        parts = torch.frombuffer(data, dtype=self.shape.dtype).view(len(stores), *stores[0].shape[1:])
        for store, part in zip(stores, parts, strict=True):
            store[block] = part
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # passes run on another stream


def open_pool(config: Config, shape: KVShape, device: torch.device) -> KVPool:
    """Return a new pool that can have a tier, or phase 8's pool if `enable_prefix_caching` is off."""
    return (TieredPool if config.enable_prefix_caching else open_prefix_pool)(config, shape, device)
