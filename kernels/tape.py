"""Records a function of tensors as the list of operators it calls, and plays them in one call without Python.

A pass through a model is some 250 operators. Called from Python, each costs some microseconds, and must release and
regain the interpreter's lock, for which other threads compete. Played from a tape (`tape.cpp`), they run one after
the other in C++, on a thread that never takes the lock.

```text
from Python    op ─ lock ─ Python ─ op ─ lock ─ Python ─ op ─ …
from a tape    op op op op op …
```

A recording is valid for inputs of any size if the function names no size: `x.view(-1, 64)`, not
`x.view(x.shape[0], 64)`. Branches on a tensor's values cannot be recorded. And no operator may be missing because
the example was small: a column of one row is contiguous, so `contiguous()` calls no operator, and for several rows
the recording would lack the copy. Such a recording is refused.

A tape calls the same operators on the same weights, so a pass has the same bits either way.
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
    """The recorded operator calls of one function.

    Calling the tape plays it: it calls the operators again, on new inputs and without Python. Any thread may play
    it, but only one thread at a time.
    """

    def __init__(self, recorded: Any) -> None:
        self.recorded = recorded

    def __len__(self) -> int:
        """Return the number of recorded calls."""
        return int(self.recorded.size())

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Play the tape. Returns the function's results for these inputs. RuntimeError: an operator failed."""
        return tuple(self.recorded.play(list(inputs)))


def record(function: Function, *inputs: Tensor) -> tuple[Tape, tuple[Tensor, ...]]:
    """Call `function` on `inputs` and record the operators it calls.

    Args:
        function: takes tensors and returns results of operators. It must not depend on the tensors' sizes.
        inputs: example inputs. All other tensors that the function uses become part of the tape, and are read and
            written in place.

    Returns:
        The tape, and the function's results.

    Raises:
        CannotRecordError: the function read a number from a tensor, a result is not an operator's, or a call would
            use other operators for more rows.
    """
    with torch.inference_mode(), _LayoutCheck(), _Recorder(inputs) as recorder:
        outputs = function(*inputs)
    return Tape(recorder.finish(outputs)), outputs


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Adds every operator that torch calls to the tape.

    The tape refers to inputs and results of operators by numbers, their slots.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.tape = torch.classes.infer.Tape(len(inputs))
        self._slots = {id(tensor): slot for slot, tensor in enumerate(inputs)}
        self._alive = list(inputs)  # kept alive, so that no id is reused during the recording

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would import its compiler, which takes seconds, to keep it away from this class."""
        return False

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
        """Add an argument to the current call. `kind` is its parameter's type in the operator's schema."""
        if isinstance(value, (int, float)) and kind == "Tensor":
            value = torch.tensor(value)  # torch accepts a number as a tensor, the tape does not
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
        """Return the slots of a call's result, a tensor or a list of tensors.

        A tensor that has a slot already, since the call wrote the tensor in place, keeps it. Any other result
        gets a new slot.
        """
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


#: Functions whose operators depend on the memory layout of their first argument.
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
    """Raises CannotRecordError for a call in `_BY_LAYOUT` that copies its tensor only if it has several rows.

    A recording made with one row would lack that copy.
    """

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
                except RuntimeError:  # the shape does not fit more rows: that dimension is not rows
                    return result
            if _is_copy(more, expected) != _is_copy(given, result):
                raise CannotRecordError(
                    f"{func.__name__} depends on the number of rows: for {list(given.shape)} it does not copy, "
                    f"for more rows it does; use clone"
                )
        return result


def _with_more_rows(tensor: Tensor) -> Tensor:
    """Return a meta tensor like `tensor`, but with size 2 in some dimensions of size 1.

    These are the dimensions whose stride is not that of a dense tensor: rows of a wider tensor, for example.
    """
    dense = torch.empty(tensor.shape, device="meta").stride()
    sizes = [
        2 if size == 1 and stride != packed else size
        for size, stride, packed in zip(tensor.shape, tensor.stride(), dense, strict=True)
    ]
    return torch.empty_strided(sizes, tensor.stride(), dtype=tensor.dtype, device="meta")


def _is_copy(given: Tensor, result: Any) -> bool:
    """Return whether a call copied its argument, or whether `is_contiguous` returned False."""
    if isinstance(result, Tensor):
        return bool(result.untyped_storage()._cdata != given.untyped_storage()._cdata)
    return not result
