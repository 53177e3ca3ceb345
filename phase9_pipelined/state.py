"""The steps in flight, oldest first. No tensors, no device.

```text
        on_launch              on_pending_commit            on_step_completed
   ──────────────────> LAUNCHED ────────────────> SAMPLED ─────────────────────> dropped
    forward passes                sampling                  tokens were read and
      submitted                  submitted                   became outputs
```

At most two steps are in flight. At most one of them is not sampled yet: the next one is launched behind its
sampling, which writes the tokens that the next one reads. Steps are committed in the order of their launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

MAX_IN_FLIGHT = 2


class Member(Protocol):
    """A request in a step; `inflight_refs` counts the steps in flight that compute for it."""

    inflight_refs: int


class Step(Protocol):
    """A step in flight. Its members do not change between its launch and its commit."""

    @property
    def members(self) -> Sequence[Member]:
        """The requests it computes for."""


StepT = TypeVar("StepT", bound=Step)


class PipelineError(RuntimeError):
    """A step was moved to a stage that its present stage does not lead to."""


class PipelineState(Generic[StepT]):
    """The queue of steps in flight. Every transition checks itself, and changes nothing if it is refused.

    Attributes:
        steps: launched and not committed, oldest first.
        launched: the newest of them, as long as its sampling was not submitted; else None.
    """

    def __init__(self) -> None:
        self.steps: deque[StepT] = deque()
        self.launched: StepT | None = None

    @property
    def has_room(self) -> bool:
        """Whether a step may be launched before one is committed."""
        return len(self.steps) < MAX_IN_FLIGHT

    @property
    def oldest(self) -> StepT | None:
        """The step to commit next; None if no step in flight is sampled."""
        return self.steps[0] if self.steps and self.steps[0] is not self.launched else None

    def on_launch(self, step: StepT) -> None:
        """Add a step. Its forward passes are submitted next."""
        if self.launched is not None:
            raise PipelineError("the step before is not sampled")
        if not self.has_room:
            raise PipelineError(f"{MAX_IN_FLIGHT} steps are in flight")
        if len({id(member) for member in step.members}) < len(step.members):
            raise PipelineError("a request is in the step twice")
        # First the record, then the counts, so that `drop_all` finds each count of an interrupted launch.
        self.steps.append(step)
        self.launched = step
        for member in step.members:
            member.inflight_refs += 1

    def on_pending_commit(self) -> None:
        """The launched step's sampling was submitted: its tokens are on their way to the host."""
        if self.launched is None:
            raise PipelineError("no step waits for its sampling")
        self.launched = None

    def on_step_completed(self, step: StepT) -> None:
        """The oldest step's tokens became outputs: drop it and its references."""
        if step is not self.oldest:
            raise PipelineError("only the oldest step may be committed, and only once it is sampled")
        for member in step.members:
            member.inflight_refs -= 1
        self.steps.popleft()

    def drop_all(self) -> None:
        """Drop all steps after a failure. May be repeated if it was interrupted."""
        for step in self.steps:
            for member in step.members:
                member.inflight_refs = 0
        self.steps.clear()
        self.launched = None
