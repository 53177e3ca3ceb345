"""The record of a step in flight: its plan, its passes, and where their results will be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from common.request import Request
from common.runner import ForwardPass, PassShare
from common.scheduling import StepPlan
from common.streams import Pending


@dataclass(slots=True)
class LaunchedPass:
    """One forward pass in flight.

    Attributes:
        requests: the requests that get a token from it, row by row.
        forward: its logits.
        sampled: the tokens sampled from them; None until the sampling is submitted.
    """

    requests: tuple[Request, ...]
    forward: Pending
    sampled: Pending | None = None

    @property
    def outcome(self) -> Pending:
        """The last thing submitted for this pass: its sampling, or its forward pass until then."""
        return self.forward if self.sampled is None else self.sampled


@dataclass(slots=True)
class DecodeSlot:
    """A step from its launch to its commit.

    Attributes:
        plan: what the step computes.
        passes: the plan as forward passes.
        launched: the passes that were submitted; fewer than `passes` if submitting one failed.
    """

    plan: StepPlan = field(default_factory=StepPlan)
    passes: list[ForwardPass] = field(default_factory=list)
    launched: list[LaunchedPass] = field(default_factory=list)

    def begin(self, plan: StepPlan, passes: list[ForwardPass]) -> None:
        self.plan, self.passes, self.launched = plan, passes, []

    @property
    def shares(self) -> Iterator[PassShare]:
        """The shares of all passes: one for each sequence in the step."""
        return (share for each in self.passes for share in each.shares)

    @property
    def waits_for_tokens(self) -> bool:
        """Whether sampling must wait until the tokens of the step before have been read (grammars, penalties)."""
        return any(
            share.sample_at is not None and share.request.waits_for_its_tokens for share in self.shares
        )

    def wait(self) -> None:
        """Block until no pass of this step computes any more, failed or not."""
        for each in self.launched:
            with suppress(Exception, SystemExit):  # the pass raised it; an interrupt is this thread's own
                each.outcome.wait()

    def clear(self) -> None:
        """Forget the step."""
        self.begin(StepPlan(), [])
