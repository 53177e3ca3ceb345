"""CUDA graphs of a pass, each for a fixed number of rows.

```text
buckets for 24 seats     1   2   4   8   16   24
a pass of 5 rows                     └── rows 0 1 2 3 4 and three copies of row 0; results 0 to 4 are returned
```

Graphs write their results to buffers, which have as many rows as the largest graph. Graphs share their buffers if
their results have the same shapes, apart from the rows. So work that reads the results must be submitted before the
next graph is launched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.tape import Function

logger = logging.getLogger(__name__)


class CudaGraph:
    """A CUDA graph: a function's kernels, captured with the addresses of their inputs and launched together.

    Args:
        function: called once with copies of the inputs, and captured. Writes its results to tensors that stay
            allocated.
        inputs: tensors on the device.
        memory: torch's memory pool for graphs. All graphs share it, since only one of them runs at a time.
    """

    def __init__(self, function: Callable[..., None], inputs: Sequence[Tensor], memory: Any) -> None:
        self._inputs = [each.clone() for each in inputs]
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        # Other threads may use the device during the capture.
        with torch.cuda.graph(self._graph, memory, stream, capture_error_mode="thread_local"):
            function(*self._inputs)

    def set(self, inputs: Sequence[Tensor]) -> None:
        """Set the values of the captured inputs for the replays from now on."""
        for kept, given in zip(self._inputs, inputs, strict=True):
            kept.copy_(given, non_blocking=True)

    def replay(self) -> None:
        """Run the captured function again."""
        self._graph.replay()


Capture = Callable[[Callable[..., None], Sequence[Tensor]], CudaGraph]


class Graphs:
    """Captures functions, each once for each number of rows, and replays the captured graphs from then on.

    Args:
        sizes: numbers of rows that graphs may have, smallest first; empty: nothing is captured.
        capture: captures a function that returns nothing, with its inputs.
        to_device: copies an input to the device of the functions.

    Attributes:
        failed: keys and sizes whose capture failed. Rows that would run in such a graph run in the next larger one,
            or without a graph.
    """

    def __init__(self, sizes: Sequence[int], capture: Capture, to_device: Callable[[Tensor], Tensor]) -> None:
        self.sizes = tuple(sizes)
        self.failed: set[tuple[Hashable, int]] = set()
        self._capture = capture
        self._to_device = to_device
        self._captured: dict[tuple[Hashable, int], CudaGraph] = {}
        self._inputs: dict[tuple[Hashable, int], list[Tensor]] = {}  # each graph's latest, on the host
        self._results: dict[Hashable, tuple[Tensor, ...]] = {}  # [largest size, ...] each

    def clear(self) -> None:
        """Forget all graphs and failures, so that each graph is captured again at its next use."""
        self.failed.clear()
        self._captured.clear()
        self._inputs.clear()
        self._results.clear()

    def size_for(self, key: Hashable, rows: int) -> int | None:
        """Return the size of the smallest graph for `key` that has room for `rows` rows; None: no graph has."""
        return next((size for size in self.sizes if size >= rows and (key, size) not in self.failed), None)

    def run(self, key: Hashable, function: Function, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run `function(*inputs)` by the smallest graph that has room for the rows of the inputs.

        The first run of a graph calls the function and captures it. If no graph has room, the function is only
        called. A captured graph's inputs are copied to the device only if they differ from its latest inputs.

        Args:
            key: names the function. Functions with equal keys must compute the same: the graph of one of them is
                replayed for all.
            function: row i of each result depends on row i of the inputs alone.
            inputs: on the host, all with the same number of rows.

        Returns:
            The function's results. Results of a graph are valid until the next run.
        """
        rows = len(inputs[0])
        size = self.size_for(key, rows)
        if size is None:
            return function(*map(self._to_device, inputs))
        filled = [torch.cat([each, each[:1].expand(size - rows, *each.shape[1:])]) for each in inputs]
        graph = self._captured.get((key, size))
        if graph is not None:
            if not all(map(torch.equal, filled, self._inputs[key, size])):
                graph.set([*map(self._to_device, filled)])
                self._inputs[key, size] = filled
            graph.replay()
            return tuple(result[:rows] for result in self._results[key])
        # Captured after a plain call: kernels must not be compiled during a capture.
        sent = [*map(self._to_device, filled)]
        results = function(*sent)
        self._add(key, size, function, sent, results)
        self._inputs[key, size] = filled
        return tuple(result[:rows] for result in results)

    def _buffers_for(self, results: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return buffers for results, with as many rows as the largest graph. They are those of another key if its
        results have the same types and, apart from the rows, the same shapes. Otherwise they are new."""
        fit = [(each.shape[1:], each.dtype) for each in results]
        for buffers in self._results.values():
            if [(each.shape[1:], each.dtype) for each in buffers] == fit:
                return buffers
        return tuple(each.new_empty(self.sizes[-1], *each.shape[1:]) for each in results)

    def _add(
        self,
        key: Hashable,
        size: int,
        function: Function,
        inputs: Sequence[Tensor],
        results: Sequence[Tensor],
    ) -> None:
        if key not in self._results:
            self._results[key] = self._buffers_for(results)
        kept = [each[:size] for each in self._results[key]]

        def write_results(*inputs: Tensor) -> None:
            for buffer, result in zip(kept, function(*inputs), strict=True):
                buffer.copy_(result)

        try:
            self._captured[key, size] = self._capture(write_results, inputs)
        except RuntimeError as error:
            self.failed.add((key, size))
            logger.warning("passes of %d rows cannot be captured here: %s", size, error)
