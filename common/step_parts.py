"""Times the parts of a running engine's steps.

```text
step     [plan][ pass ................. ][sample][commit]            phases 4 to 8
step     [commit][plan][launch][ wait ..... ]                         phase 9
stream     forward ....... ][ sample ][ forward ................
```
"""

from __future__ import annotations

from common.engine import Engine
from common.telemetry import Part, PartTimer


class StepParts:
    """Times the parts of an engine's steps from `start` to `stop`. Its methods are called between two steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._timer = PartTimer(engine.clock)

    def start(self) -> None:
        self._engine.telemetry.timer = self._timer
        self._engine.runner.time_stream(True)

    def take(self) -> list[Part]:
        """Return the parts that have ended since the last call: first the host's, then the stream's, each in order.
        A part of the stream may belong to an earlier step."""
        return self._timer.take() + self._engine.runner.take_stream_parts()

    def stop(self) -> None:
        self._engine.telemetry.timer = None
        self._engine.runner.time_stream(False)
