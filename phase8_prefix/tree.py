"""Finds the blocks of a prefix: a radix tree over token ids (Zheng et al. 2024, RadixAttention). No tensors.

```text
block size 4, prompts with the same prefix

  root ── You are a friendly ── assistant. User : What ── is a radix tree ?      an edge is a block of
          block 5, users 2      block 0, users 2      └── is a block table ?     token ids, the node below
                                                          block 3, users 1       it owns the physical block
```

Token ids are compared, not only hashed, so a hash collision never gives a wrong hit. A sequence that uses a node
uses every node above it. So unused nodes have only unused nodes below them, and can be evicted leaves first.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

Key = tuple[object, ...]  # a block's token ids; in a text's first block the salt comes before them


class Node:
    """One block of a text. Its ancestors are the blocks before it. `users` is the number of sequences that use it.

    A sequence that uses a node *holds* it: the node is not evicted.
    `digest` is for phase 11: a hash of the text up to the node's end.
    """

    __slots__ = ("block", "children", "digest", "key", "parent", "users")

    def __init__(self, key: Key, block: int, parent: Node | None) -> None:
        self.key = key
        self.block = block
        self.parent = parent
        self.children: dict[Key, Node] = {}
        self.users = 1
        self.digest = b""


class PrefixTree:
    """Holds the nodes of the cached texts: a path of nodes below the root is a text.

    Every operation is O(1) per block, however large the tree. A parameter `held` is the beginning of a path,
    which the caller holds already. The returned nodes are those after `held`. A text's salt (see
    `Request.cache_salt`) is part of the text: texts with the same tokens, but other salts, have other paths.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.insertions = 0  # nodes added since the start: while the number is the same, no text has new hits
        self.root = Node((), -1, None)
        # Least recently used first. Paths are released from their end, so a node comes after the nodes below it:
        # the first node is always a leaf, without a search.
        self._unused: OrderedDict[Node, None] = OrderedDict()

    def match(self, token_ids: Sequence[int], salt: str = "", held: Sequence[Node] = ()) -> list[Node]:
        """Return the longest path of whole blocks in the tree that is a prefix of `token_ids`. Adds no user."""
        path: list[Node] = []
        children = (held[-1] if held else self.root).children
        for key in self.keys(token_ids, salt, len(held)):
            if key not in children:
                break
            path.append(children[key])
            children = path[-1].children
        return path

    def hold(self, path: Iterable[Node]) -> None:
        """Add a user to each of these nodes. The caller holds the nodes above them already."""
        for node in path:
            if node.users == 0:
                del self._unused[node]
            node.users += 1

    def release(self, path: Sequence[Node]) -> None:
        """Remove a user from each node of a whole path, from a child of the root on. Nodes without users stay
        in the tree until they are evicted."""
        for node in reversed(path):
            node.users -= 1
            if node.users == 0:
                self._unused[node] = None

    def insert(
        self, token_ids: Sequence[int], block_ids: Sequence[int], salt: str = "", held: Sequence[Node] = ()
    ) -> list[Node]:
        """Insert a text's blocks (those after `held`) and hold their nodes. Returns the nodes.

        A node that exists already keeps its block. Then the caller keeps its own block with the same content.
        """
        path: list[Node] = []
        node = held[-1] if held else self.root
        for key, block in zip(self.keys(token_ids, salt, len(held)), block_ids, strict=False):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(key, block, node)
                self.insertions += 1
            else:
                self.hold((child,))
            path.append(child)
            node = child
        return path

    def evict(self, count: int) -> list[int]:
        """Remove up to `count` unused nodes, least recently used first. Returns their blocks."""
        blocks: list[int] = []
        while self._unused and len(blocks) < count:
            node, _ = self._unused.popitem(last=False)
            assert node.parent is not None
            del node.parent.children[node.key]
            blocks.append(node.block)
        return blocks

    def clear(self) -> None:
        """Remove all nodes, used or not."""
        self.root.children.clear()
        self._unused.clear()

    def evictable_count(self) -> int:
        return len(self._unused)

    def unused_blocks(self) -> list[int]:
        """Return the blocks of unused nodes, in the order of eviction."""
        return [node.block for node in self._unused]

    def walk(self) -> Iterator[tuple[int, Node]]:
        """Yield every node but the root with its depth (0: a child of the root), parents before their children."""
        stack = [(0, child) for child in reversed(self.root.children.values())]
        while stack:
            depth, node = stack.pop()
            yield depth, node
            stack += [(depth + 1, child) for child in reversed(node.children.values())]

    def keys(self, token_ids: Sequence[int], salt: str, first: int) -> Iterator[Key]:
        """Yield the keys of a text's whole blocks, from block `first` on."""
        ids = iter(token_ids[first * self.block_size :])
        blocks: Iterator[Key] = zip(*[ids] * self.block_size, strict=False)
        salted = itertools.islice(blocks, 1 if first == 0 else 0)
        return itertools.chain(((salt, *key) for key in salted), blocks)
