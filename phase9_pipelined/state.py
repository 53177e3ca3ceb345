"""The steps in flight, oldest first.

```text
        on_launch              on_pending_commit            on_step_completed
   ──────────────────> LAUNCHED ────────────────> SAMPLED ─────────────────────> dropped
    forward passes                sampling                  tokens were read and
      submitted                  submitted                   became outputs
```

At most two steps are in flight, and the sampling of at most one of them is not submitted yet. A step is launched
only after the sampling of the step before is submitted, since that sampling writes the tokens that the new step
reads. Steps are committed in the order of their launch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from common.devices.streams import Pending
from common.engine.runner import PassShare
from common.engine.scheduling import StepPlan
from common.request import Request

MAX_IN_FLIGHT = 2


@dataclass(slots=True)
class LaunchedPass:
    """A forward pass in flight."""

    shares: tuple[PassShare, ...]
    requests: tuple[Request, ...]  # of each sampled row, in order
    work: Pending  # the work submitted last: the forward pass, later its sampling
    draws: bool = False  # has drawn a token for each row; used if every request has `sampling.draws_at_seat`


@dataclass(slots=True, eq=False)
class DecodeSlot:
    """A step in flight: created at its launch, and dropped at its commit or after a failure."""

    plan: StepPlan
    passes: list[LaunchedPass] = field(default_factory=list)  # the passes that were submitted so far

    @property
    def members(self) -> tuple[Request, ...]:
        """The requests for which the step computes tokens."""
        return self.plan.requests

    @property
    def waits_for_tokens(self) -> bool:
        """Whether sampling must wait until the tokens of the step before have been read, since a request has a
        grammar or `bad_words` of several tokens."""
        return any(request.sampling.waits_for_tokens for each in self.passes for request in each.requests)

    def wait(self) -> None:
        """Block until no pass of this step computes any more, failed or not."""
        for each in self.passes:
            each.work.end()


class PipelineError(RuntimeError):
    """A step was moved to a stage that does not follow its present stage."""


class PipelineState:
    """The queue of steps in flight. An illegal transition raises PipelineError and changes nothing.

    A request's `inflight_refs` counts the steps in the queue that compute for it.

    Attributes:
        steps: launched and not committed, oldest first.
        launched: the newest step, as long as its sampling is not submitted; else None.
        most: how many steps may be in flight.
    """

    def __init__(self) -> None:
        self.steps: deque[DecodeSlot] = deque()
        self.launched: DecodeSlot | None = None
        self.most = MAX_IN_FLIGHT

    @property
    def has_room(self) -> bool:
        """Whether one more step may be launched before a step is committed."""
        return len(self.steps) < self.most

    @property
    def oldest(self) -> DecodeSlot | None:
        """The step to commit next; None if no step in flight is sampled."""
        return self.steps[0] if self.steps and self.steps[0] is not self.launched else None

    def on_launch(self, step: DecodeSlot) -> None:
        """Add a step, and count it in its requests' `inflight_refs`. Its forward passes are submitted next."""
        members = step.members
        if self.launched is not None:
            raise PipelineError("the step before is not sampled")
        if not self.has_room:
            raise PipelineError(f"no more than {self.most} steps may be in flight")
        if len(set(members)) < len(members):
            raise PipelineError("a request is in the step twice")
        # First the record, then the counts, so that `drop_all` finds each count of an interrupted launch.
        self.steps.append(step)
        self.launched = step
        for member in members:
            member.inflight_refs += 1

    def on_pending_commit(self) -> None:
        """Mark the launched step as sampled: its sampling and the copy of its tokens were submitted."""
        if self.launched is None:
            raise PipelineError("no step waits for its sampling")
        self.launched = None

    def on_step_completed(self, step: DecodeSlot) -> None:
        """Drop the oldest step, whose tokens became outputs, and lower its requests' `inflight_refs` by 1."""
        if step is not self.oldest:
            raise PipelineError("only the oldest step may be committed, and only once it is sampled")
        for member in step.members:
            member.inflight_refs -= 1
        self.steps.popleft()

    def drop_all(self) -> None:
        """Drop all steps, and set their requests' `inflight_refs` to 0. If this is interrupted, it may be
        called again."""
        for step in self.steps:
            for member in step.members:
                member.inflight_refs = 0
        self.steps.clear()
        self.launched = None
