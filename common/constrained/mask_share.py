"""Shares the time of a step between the grammars of its requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

#: The weight of a new step in the running mean of the time of a step's pass.
PACE = 0.1

#: A longer pass counts as one of so many seconds: the engine may have been idle in between.
LONGEST_PASS_S = 0.1


class Turns(Protocol):
    """A matcher that takes turns.

    Attributes:
        has_turn: whether its request goes on in the next step.
        last_turn: number of the latest step in which it had a turn.
    """

    has_turn: bool
    last_turn: int

    @property
    def mean_s(self) -> float:
        """Seconds that a token may take, by the answer's budget."""

    @property
    def pace_s(self) -> float | None:
        """Seconds that a token takes, by the latest token and the mean of all; None: no token has come."""


class MaskShare:
    """Bounds the time of all masks of a step together. Each answer's masks have a budget, but a step waits for the
    masks of all its requests.

    The share of a step is as long as its pass, or one answer's budget for a token if that is more. Requests whose
    tokens take at most an even part of the share go on in every step. The others, and those that have just begun,
    go on while the share has time left, the one that has waited longest first. Time that they take beyond the share
    is owed: until it is paid back by later steps, they wait.
    """

    def __init__(self) -> None:
        self._step = 0
        self._step_began_s = time.perf_counter()
        self._blocked_s = 0.0
        self._pass_s = 0.0
        self._left_s = 0.0
        self._even_s = 0.0

    def spend(self, seconds: float) -> None:
        """Subtract the processor time of one request's token from the share, if it is more than an even part."""
        if seconds > self._even_s:
            self._left_s -= seconds

    def block(self, seconds: float) -> None:
        """Note that the step has waited for a mask. This time is not part of its pass."""
        self._blocked_s += seconds

    def deal(self, matchers: Sequence[Turns], *, others: bool) -> None:
        """Begin a step: set which of the requests with these matchers go on in it.

        Args:
            matchers: those of the requests that want a token.
            others: whether the step may compute other requests. If not, at least one request goes on.
        """
        now_s = time.perf_counter()
        pass_s = min(now_s - self._step_began_s - self._blocked_s, LONGEST_PASS_S)
        self._pass_s += PACE * (pass_s - self._pass_s)
        self._step_began_s, self._blocked_s, self._step = now_s, 0.0, self._step + 1
        if not matchers:
            return
        share_s = max(matchers[0].mean_s, self._pass_s)
        self._even_s = share_s / len(matchers)
        self._left_s = min(self._left_s + share_s, share_s)
        left_s = self._left_s
        for matcher in sorted(matchers, key=lambda each: each.last_turn):
            pace_s = matcher.pace_s
            is_quick = pace_s is not None and pace_s <= self._even_s
            matcher.has_turn = is_quick or left_s > 0
            if not is_quick and matcher.has_turn:
                left_s -= pace_s or self._even_s
        if not others and not any(matcher.has_turn for matcher in matchers):
            min(matchers, key=lambda each: each.last_turn).has_turn = True
        for matcher in matchers:
            if matcher.has_turn:
                matcher.last_turn = self._step
