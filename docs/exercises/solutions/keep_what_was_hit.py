"""Solution: who leaves a path that was never hit puts it first. What was hit once stays for long, needed or not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from phase8_prefix.tree import Node, PrefixTree


class KeepWhatWasHit(PrefixTree):
    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self._hit: set[Node] = set()

    def hold(self, path: Iterable[Node]) -> None:
        nodes = list(path)
        self._hit.update(nodes)
        super().hold(nodes)

    def release(self, path: Sequence[Node]) -> None:
        super().release(path)
        for node in path:  # the path's end is moved last, and so comes first
            if node.users == 0 and node not in self._hit:
                self._unused.move_to_end(node, last=False)

    def evict(self, count: int) -> list[int]:
        blocks = super().evict(count)
        self._hit.intersection_update(node for _, node in self.walk())
        return blocks
