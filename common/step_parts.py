"""What a step's time goes into, taken from an engine that runs.

```text
step     [plan][ pass ................. ][sample][commit]            phases 4 to 8
step     [commit][plan][launch][ wait ..... ]                         phase 9
stream     forward ....... ][ sample ][ forward ................
```
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from common.engine import Engine
from common.runner import Runner
from common.telemetry import Part


class StepParts:
    """Times parts of steps from `start` to `stop`: stands in for the methods that an engine and its runner name as
    `PARTS`. An engine that nobody watches runs its own.

    Its methods are called between two steps.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._taken: list[Part] = []
        self._restore: list[Callable[[], None]] = []

    def start(self) -> None:
        for owner in (self._engine, self._engine.runner):
            for name, what in owner.PARTS.items():
                self._restore.append(stand_in(owner, name, functools.partial(self._timed, what)))
        self._engine.runner.time_stream(True)

    def take(self) -> list[Part]:
        """Those that have ended since the last call: the host's, outer ones before those inside them, and then the
        stream's, in order. A part of the stream's may be of an earlier step."""
        host, self._taken[:] = sorted(self._taken, key=lambda part: (part.began_s, -part.ended_s)), []
        return host + self._engine.runner.take_stream_parts()

    def stop(self) -> None:
        while self._restore:
            self._restore.pop()()
        self._engine.runner.time_stream(False)

    def _timed(self, what: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began_s = self._engine.clock()
            try:
                return method(*arguments, **named)
            finally:
                self._taken.append(Part("host", what, began_s, self._engine.clock()))

        return timed


def stand_in(
    owner: Engine | Runner, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Let `around(method)` be called instead of an object's method; what puts the method back."""
    own = vars(owner).get(name)  # somebody stands in already
    setattr(owner, name, around(getattr(owner, name)))
    return (
        functools.partial(delattr, owner, name)
        if own is None
        else functools.partial(setattr, owner, name, own)
    )
