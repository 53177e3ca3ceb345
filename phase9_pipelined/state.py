"""Which step is where: two slots, used in turn. No tensors, no device.

```text
            on_launch        on_pending_commit       pop_oldest         on_step_completed
   FREE ───────────> LAUNCHED ──────────────> SAMPLED ────────> COMMITTING ────────────> FREE
            forward pass      sampling         in a queue,       tokens are read
            submitted         submitted        oldest first      and become outputs
```

At most one step is launched and not sampled, since what is sampled next is always the latest forward pass, and at
most one is being committed. A slot is free again when its step is committed, not when its tokens have arrived:
until then row `i` of its results must still mean sequence `i` of its plan.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from typing import Protocol

SLOTS = 2


class Member(Protocol):
    """Who is part of a step; `inflight_refs` counts the steps."""

    inflight_refs: int


class Stage(enum.Enum):
    """Where a slot's step is."""

    FREE = "free"
    LAUNCHED = "launched"
    SAMPLED = "sampled"
    COMMITTING = "committing"


class PipelineError(RuntimeError):
    """A step was moved to where its present stage does not lead."""


class PipelineState:
    """The stages of both slots, and who is part of their steps. Every transition checks itself."""

    def __init__(self) -> None:
        self._stages = [Stage.FREE] * SLOTS
        self._members: list[tuple[Member, ...]] = [()] * SLOTS
        self._queue: deque[int] = deque()  # sampled, oldest first
        self._latest = SLOTS - 1  # which slot was launched last

    # ------------------------------------------------------------------ what is where

    def stage(self, slot_id: int) -> Stage:
        return self._stages[slot_id]

    def members(self, slot_id: int) -> tuple[Member, ...]:
        """Who is part of this slot's step: fixed at its launch."""
        return self._members[slot_id]

    @property
    def in_flight(self) -> int:
        """Steps that were launched and are not committed."""
        return SLOTS - self._stages.count(Stage.FREE)

    @property
    def launched(self) -> int | None:
        """The slot whose step waits to be sampled."""
        return self._find(Stage.LAUNCHED)

    @property
    def committing(self) -> int | None:
        return self._find(Stage.COMMITTING)

    @property
    def oldest(self) -> int | None:
        """The slot whose step is committed next."""
        return self._queue[0] if self._queue else None

    def free_slot_id(self) -> int | None:
        """A slot for the next step; None: one must be committed first. Slots take turns."""
        for turn in range(1, SLOTS + 1):
            slot_id = (self._latest + turn) % SLOTS
            if self._stages[slot_id] is Stage.FREE:
                return slot_id
        return None

    def in_order(self) -> list[int]:
        """The slots of all that is in flight, oldest first."""
        stages = [self.committing, *self._queue, self.launched]
        return [slot_id for slot_id in stages if slot_id is not None]

    def _find(self, stage: Stage) -> int | None:
        return self._stages.index(stage) if stage in self._stages else None

    # ------------------------------------------------------------------ transitions

    def on_launch(self, slot_id: int, members: Sequence[Member]) -> None:
        """A step begins, with these members. Its forward pass is handed in next."""
        self._check(slot_id, Stage.FREE)
        if self.launched is not None:
            raise PipelineError(f"slot {slot_id} was launched before slot {self.launched} was sampled")
        if len({id(member) for member in members}) < len(members):
            raise PipelineError("somebody is in one step twice")
        if any(member.inflight_refs >= SLOTS for member in members):
            raise PipelineError(f"somebody is in more than {SLOTS} steps")
        # First the record, then the counts: `drop_all` then finds whatever an interrupted launch has counted.
        self._members[slot_id] = tuple(members)
        self._stages[slot_id] = Stage.LAUNCHED
        self._latest = slot_id
        for member in members:
            member.inflight_refs += 1

    def on_pending_commit(self, slot_id: int) -> None:
        """The step's tokens are on their way."""
        self._check(slot_id, Stage.LAUNCHED)
        self._stages[slot_id] = Stage.SAMPLED
        self._queue.append(slot_id)

    def pop_oldest(self) -> int:
        """The slot whose step is to be committed now."""
        if self.committing is not None:
            raise PipelineError(f"slot {self.committing} is being committed")
        if not self._queue:
            raise PipelineError("no step waits to be committed")
        slot_id = self._queue.popleft()
        self._stages[slot_id] = Stage.COMMITTING
        return slot_id

    def on_step_completed(self, slot_id: int) -> None:
        """The step is committed: its members are let go, its slot is free."""
        self._check(slot_id, Stage.COMMITTING)
        self._release(slot_id)

    def drop_all(self) -> None:
        """Free both slots, whatever their stages, after a failure. May be repeated if it was interrupted."""
        for slot_id, members in enumerate(self._members):
            for member in members:
                member.inflight_refs = 0  # no step is in flight any more
            self._members[slot_id] = ()
            self._stages[slot_id] = Stage.FREE
        self._queue.clear()

    def _release(self, slot_id: int) -> None:
        for member in self._members[slot_id]:
            member.inflight_refs -= 1
        self._members[slot_id] = ()
        self._stages[slot_id] = Stage.FREE

    def _check(self, slot_id: int, stage: Stage) -> None:
        if not 0 <= slot_id < SLOTS:
            raise PipelineError(f"there is no slot {slot_id}")
        if self._stages[slot_id] is not stage:
            raise PipelineError(f"slot {slot_id} is {self._stages[slot_id].value}, not {stage.value}")
