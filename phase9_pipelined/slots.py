"""A step in flight: its plan, its passes, and the handles of their results."""

from __future__ import annotations

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
        requests: the request of each sampled row, in order.
        forward: its logits.
        sampled: the tokens sampled from them; None until the sampling is submitted.
    """

    requests: tuple[Request, ...]
    forward: Pending
    sampled: Pending | None = None

    @property
    def outcome(self) -> Pending:
        """The last work submitted for this pass: its sampling, or its forward pass until then."""
        return self.forward if self.sampled is None else self.sampled


@dataclass(slots=True, eq=False)
class DecodeSlot:
    """A step, made at its launch and dropped at its commit.

    Attributes:
        plan: what the step computes.
        passes: the plan as forward passes.
        launched: the passes that were submitted; fewer than `passes` if submitting one failed.
        shares: the shares of all passes: one for each sequence in the step.
        members: their requests.
    """

    plan: StepPlan
    passes: tuple[ForwardPass, ...]
    launched: list[LaunchedPass] = field(default_factory=list)
    shares: tuple[PassShare, ...] = field(init=False)
    members: tuple[Request, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.shares = tuple([share for each in self.passes for share in each.shares])
        self.members = tuple([share.request for share in self.shares])

    @property
    def waits_for_tokens(self) -> bool:
        """Whether sampling must wait until the tokens of the step before have been read (grammars, penalties)."""
        return any(share.sample_at and share.request.waits_for_its_tokens for share in self.shares)

    def wait(self) -> None:
        """Block until no pass of this step computes any more, failed or not."""
        for each in self.launched:
            with suppress(Exception, SystemExit):  # the pass raised it; an interrupt is this thread's own
                each.outcome.wait()
