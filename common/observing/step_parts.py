"""Times the parts of a running engine's steps.

```text
step     [plan][ pass ................. ][sample][commit]            phases 4 to 8
step     [ wait ..... ][commit][plan][launch]                         phases 9 and 10
stream   .. forward ][ sample ][ forward ................
```

If requests have masks of allowed tokens, the step has a part `mask`, too: the time until the masks are computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.engine.telemetry import Part, PartTimer

if TYPE_CHECKING:  # it imports torch, which the server's process does without
    from common.engine.engine import Engine


class StepParts:
    """Times the parts of an engine's steps from `start` to `stop`. Call its methods between two steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._timer = PartTimer(engine.clock)

    def start(self) -> None:
        self._time(self._timer)

    def take(self) -> list[Part]:
        """Return the parts that have ended since the last call: first the host's in order of time, then the latest
        of the stream's (see `Stream.take_times`). A part of the stream may belong to an earlier step."""
        stream = self._engine.runner.stream
        works = [] if stream is None else stream.take_times()
        return self._timer.take() + [Part("stream", work.name, work.began_s, work.ended_s) for work in works]

    def stop(self) -> None:
        self._time(None)

    def _time(self, timer: PartTimer | None) -> None:
        self._engine.telemetry.timer = timer
        if self._engine.runner.stream is not None:
            self._engine.runner.stream.time_work(timer is not None)
