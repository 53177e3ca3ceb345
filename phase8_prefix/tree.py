"""Which blocks hold which text: a radix tree over token ids (Zheng et al. 2024, RadixAttention). No tensors.

```text
block size 4, prompts that begin alike

  root ── You are a friendly ── assistant. User : What ── is a radix tree ?      an edge is a block of
          block 5, users 2      block 0, users 2      └── is a block table ?     token ids, the node below
                                                          block 3, users 1       it owns the physical block
```

Token ids are compared, not only hashed: another text never passes for the one asked for. Whoever uses a node uses
every node above it. So what nobody uses hangs together at the tree's ends, and can be evicted, leaves first.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

Key = tuple[object, ...]  # a block's token ids; before those of a text's first block, the salt


class Node:
    """A block of text after that of the nodes above; `users` counts the sequences that hold it."""

    __slots__ = ("block", "children", "key", "parent", "users")

    def __init__(self, key: Key, block: int, parent: Node | None) -> None:
        self.key = key
        self.block = block
        self.parent = parent
        self.children: dict[Key, Node] = {}
        self.users = 1


class PrefixTree:
    """Paths of nodes from the root are texts. Every operation is O(1) a block, however large the tree.

    `held`, where it is taken, is a path's beginning that the caller holds, and answers are what follows it. A salt
    (see `Request.cache_salt`) keeps texts apart that are the same.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.insertions = (
            0  # nodes added since the start: while it stands still, no text finds more than before
        )
        self._root = Node((), -1, None)
        # Least recently used first. A path is let go from its end, so a node comes after those below it: the first
        # is always a leaf, without a search.
        self._unused: OrderedDict[Node, None] = OrderedDict()

    def match(self, token_ids: Sequence[int], salt: str = "", held: Sequence[Node] = ()) -> list[Node]:
        """The longest path of whole blocks that `token_ids` begin with; changes nothing."""
        path: list[Node] = []
        children = (held[-1] if held else self._root).children
        for key in self._keys(token_ids, salt, len(held)):
            if key not in children:
                break
            path.append(children[key])
            children = path[-1].children
        return path

    def hold(self, path: Iterable[Node]) -> None:
        """Use these nodes, too; those above them are held already."""
        for node in path:
            if node.users == 0:
                del self._unused[node]
            node.users += 1

    def release(self, path: Sequence[Node]) -> None:
        """Let go of a path, whole, from the root. It stays until it is evicted."""
        for node in reversed(path):
            node.users -= 1
            if node.users == 0:
                self._unused[node] = None

    def insert(
        self, token_ids: Sequence[int], block_ids: Sequence[int], salt: str = "", held: Sequence[Node] = ()
    ) -> list[Node]:
        """Add a text's blocks and hold their nodes. Where one is there already it keeps its block: the caller's
        holds the same, and remains the caller's."""
        path: list[Node] = []
        node = held[-1] if held else self._root
        for key, block in zip(self._keys(token_ids, salt, len(held)), block_ids, strict=False):
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
        """Forget `count` nodes that nobody uses, or all there are, least recently used first: their blocks."""
        blocks: list[int] = []
        while self._unused and len(blocks) < count:
            node, _ = self._unused.popitem(last=False)
            assert node.parent is not None
            del node.parent.children[node.key]
            blocks.append(node.block)
        return blocks

    def clear(self) -> None:
        """Forget all nodes, used or not."""
        self._root.children.clear()
        self._unused.clear()

    def evictable_count(self) -> int:
        return len(self._unused)

    def unused_blocks(self) -> list[int]:
        """Blocks of the nodes that nobody uses, in the order in which they would be evicted."""
        return [node.block for node in self._unused]

    def walk(self) -> Iterator[tuple[int, Node]]:
        """Every node and its depth, parents before their children."""
        stack = [(0, child) for child in reversed(self._root.children.values())]
        while stack:
            depth, node = stack.pop()
            yield depth, node
            stack += [(depth + 1, child) for child in reversed(node.children.values())]

    def _keys(self, token_ids: Sequence[int], salt: str, first: int) -> Iterator[Key]:
        """A text's whole blocks from block `first` on."""
        ids = iter(token_ids[first * self.block_size :])
        blocks: Iterator[Key] = zip(*[ids] * self.block_size, strict=False)
        salted = itertools.islice(blocks, 1 if first == 0 else 0)
        return itertools.chain(((salt, *key) for key in salted), blocks)
