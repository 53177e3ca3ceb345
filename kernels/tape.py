"""A function of tensors recorded once as the operators it calls, and played back in one call outside Python.

A pass through a model is some 250 operators. From Python each of them costs microseconds of its own, lets the
interpreter's lock go and must get it back, behind whatever other threads do meanwhile. Played from a tape
(`tape.cpp`), they follow one another in C++, on a thread that never asks for the lock.

```text
from Python    op ─ lock ─ Python ─ op ─ lock ─ Python ─ op ─ …
from a tape    op op op op op …
```

A recording holds for inputs of any size as long as the function names no size: `x.view(-1, 64)`, not
`x.view(x.shape[0], 64)`. It holds no decision either: what depends on a number in a tensor cannot be recorded.
And no operator may be missing because the example was small. A column of one row is contiguous as it is, so
`contiguous()` calls no operator, and the column of several rows would stay as it lies. Such a recording is refused.

Operators are called as they were recorded, on the same weights, so a pass has the same bits either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

Function = Callable[..., tuple[Tensor, ...]]


class CannotRecordError(RuntimeError):
    """A function did something that a tape cannot repeat."""


class Tape:
    """One recorded function. Any thread may play it, one at a time."""

    def __init__(self, recorded: Any) -> None:
        self.recorded = recorded

    def __len__(self) -> int:
        """Calls of operators."""
        return int(self.recorded.size())

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What the function would return for these inputs. RuntimeError: an operator's own."""
        return tuple(self.recorded.play(list(inputs)))


def record(function: Function, *inputs: Tensor) -> tuple[Tape, tuple[Tensor, ...]]:
    """Call `function` on `inputs` and write down the operators it calls.

    Args:
        function: takes tensors, returns some that operators made; names no size of theirs.
        inputs: an example. All other tensors that it uses become part of the tape, to be read and written in place.

    Returns:
        The tape, and what the function returned.

    Raises:
        CannotRecordError: it read a number out of a tensor, a result is no operator's, or a call would have called
            other operators for more rows.
    """
    with torch.inference_mode(), _LayoutCheck(), _Recorder(inputs) as recorder:
        outputs = function(*inputs)
    return Tape(recorder.finish(outputs)), outputs


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Sees every operator that torch is asked for, and tells the tape."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.tape = torch.classes.infer.Tape(len(inputs))
        self._slots = {id(tensor): slot for slot, tensor in enumerate(inputs)}
        self._alive = list(inputs)  # an id must not come again while the recording goes on

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(result, (bool, int, float)):
            raise CannotRecordError("a number was read out of a tensor")
        self.tape.begin(func._schema.name, func._schema.overload_name)
        for place, argument in enumerate(func._schema.arguments):
            if place < len(args):
                self._add(args[place], str(argument.type))
            elif argument.name in kwargs:
                self._add(kwargs[argument.name], str(argument.type))
            else:
                self.tape.add_default()
        returned = {0: (), 1: (result,)}.get(len(func._schema.returns), result)
        self.tape.end([self._result_slots(each) for each in returned])
        return result

    def _add(self, value: Any, kind: str) -> None:
        """One argument of the call that has begun."""
        if isinstance(value, (int, float)) and kind == "Tensor":
            value = torch.tensor(value)  # torch takes a number for a tensor, the tape does not
        if isinstance(value, Tensor) and id(value) in self._slots:
            self.tape.add_tensor(self._slots[id(value)])
        elif isinstance(value, (list, tuple)) and not value:
            self.tape.add_empty_list()
        elif isinstance(value, (list, tuple)) and isinstance(value[0], Tensor):
            self.tape.add_list([self._slot_of(each) for each in value])
        else:
            self.tape.add_constant(list(value) if isinstance(value, tuple) else value)

    def _slot_of(self, tensor: Tensor) -> int:
        if id(tensor) not in self._slots:
            self._alive.append(tensor)
            self._slots[id(tensor)] = self.tape.hold(tensor)
        return self._slots[id(tensor)]

    def _result_slots(self, result: Any) -> list[int]:
        """Slots for a tensor that a call returned, or for a list of them: new ones, unless it wrote in place."""
        tensors = [result] if isinstance(result, Tensor) else result
        made = [tensor for tensor in tensors if id(tensor) not in self._slots]
        self._alive += made
        self._slots |= {id(tensor): self.tape.new_slot() for tensor in made}
        return [self._slots[id(tensor)] for tensor in tensors]

    def finish(self, outputs: Sequence[Tensor]) -> Any:
        if any(id(output) not in self._slots for output in outputs):
            raise CannotRecordError("the result was not made by an operator")
        self.tape.finish([self._slots[id(output)] for output in outputs])
        return self.tape


#: Functions that call one operator or another, or none, by how their first argument lies in memory.
_BY_LAYOUT = (
    *(
        Tensor.contiguous,
        Tensor.is_contiguous,
        Tensor.reshape,
        Tensor.reshape_as,
        Tensor.flatten,
        Tensor.ravel,
    ),
    *(torch.reshape, torch.flatten, torch.ravel),
)


class _LayoutCheck(TorchFunctionMode):
    """Refuses a call that copies a tensor of several rows, and does not copy this one because it has one row."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _BY_LAYOUT:
            with _disable_current_modes():
                given, more = args[0], _with_more_rows(args[0])
                try:
                    expected = func(more, *args[1:], **(kwargs or {}))
                except RuntimeError:  # a shape that these rows do not fit: the dimension counts no rows
                    return result
            if _is_copy(more, expected) != _is_copy(given, result):
                raise CannotRecordError(
                    f"{func.__name__} depends on the number of rows: for {list(given.shape)} it does not copy, "
                    f"for more rows it does; use clone"
                )
        return result


def _with_more_rows(tensor: Tensor) -> Tensor:
    """A stand-in without memory, of two where `tensor` has one and its stride says nothing about it."""
    dense = torch.empty(tensor.shape, device="meta").stride()
    sizes = [
        2 if size == 1 and stride != packed else size
        for size, stride, packed in zip(tensor.shape, tensor.stride(), dense, strict=True)
    ]
    return torch.empty_strided(sizes, tensor.stride(), dtype=tensor.dtype, device="meta")


def _is_copy(given: Tensor, result: Any) -> bool:
    """Whether a call has copied its argument, or would: `is_contiguous` says False."""
    if isinstance(result, Tensor):
        return bool(result.untyped_storage()._cdata != given.untyped_storage()._cdata)
    return not result
