"""What a step in flight needs to be remembered for."""

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
    """One forward pass on its way.

    Attributes:
        requests: whose next tokens it is for, row by row.
        forward: its logits.
        sampled: the tokens chosen from them, once those are handed in, too.
    """

    requests: tuple[Request, ...]
    forward: Pending
    sampled: Pending | None = None

    @property
    def outcome(self) -> Pending:
        """What to wait for."""
        return self.forward if self.sampled is None else self.sampled


@dataclass(slots=True)
class DecodeSlot:
    """A step from its launch to its commit.

    Attributes:
        plan: what the step computes.
        passes: the same as forward passes.
        launched: those that are on their way; fewer than `passes` if handing one in failed.
    """

    plan: StepPlan = field(default_factory=StepPlan)
    passes: list[ForwardPass] = field(default_factory=list)
    launched: list[LaunchedPass] = field(default_factory=list)

    def begin(self, plan: StepPlan, passes: list[ForwardPass]) -> None:
        self.plan, self.passes, self.launched = plan, passes, []

    @property
    def shares(self) -> Iterator[PassShare]:
        """Of all passes: one of each sequence in the step."""
        return (share for each in self.passes for share in each.shares)

    @property
    def waits_for_tokens(self) -> bool:
        """Whether some of its tokens cannot be chosen before those of the step before have been read."""
        return any(
            share.sample_at is not None and share.request.waits_for_its_tokens for share in self.shares
        )

    def wait(self) -> None:
        """Wait until nothing computes for it any more, whatever comes of it."""
        for each in self.launched:
            with suppress(Exception):
                each.outcome.wait()

    def abandon(self) -> None:
        """Forget the step, once nothing computes for it."""
        self.wait()
        self.begin(StepPlan(), [])
