"""Stand-ins for CUDA graphs: a replay calls the captured function on the same input tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from common.devices.graphs import Graphs


class StandIn:
    """Calls the captured function where a graph would launch its kernels."""

    def __init__(self, function: Callable[..., None], inputs: Sequence[Tensor]) -> None:
        self._function = function
        self._inputs = [each.clone() for each in inputs]

    def set(self, inputs: Sequence[Tensor]) -> None:
        for kept, given in zip(self._inputs, inputs, strict=True):
            kept.copy_(given)

    def replay(self) -> None:
        self._function(*self._inputs)


class StandIns(Graphs):
    """Graphs made of `StandIn`, for a CPU.

    Attributes:
        captured_rows: the rows of each capture, in order.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        fails: Callable[[int], bool] = lambda _: False,
        to_device: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        self.captured_rows: list[int] = []

        def capture(function: Callable[..., None], inputs: Sequence[Tensor]) -> StandIn:
            self.captured_rows.append(len(inputs[0]))
            if fails(len(inputs[0])):
                raise RuntimeError("this capture fails")
            return StandIn(function, inputs)

        super().__init__(sizes, capture, to_device)
