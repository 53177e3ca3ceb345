"""The state that a GPU holds for each seat (a place in the batch), and the changes that the host sends.

A decode step needs each sequence's latest token, its length, its sampling parameters and a random number. Nearly
all of it is on the device already: the step before drew the token and advanced the length, and parameters never
change. So the host keeps a record of the state that the device will have once all submitted work is done. It
compares this record with the needs of the next step, and sends the difference:

| sent | when |
| --- | --- |
| a length | the recorded length differs: passes with prompts or guesses advance no lengths on the device |
| parameters and `UNIFORMS` random numbers | a request is new at its seat, or has used up its numbers |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.request import Request
from common.runner import PassShare
from common.sampling_inputs import GREEDY, settings_of
from kernels.draw import SETTINGS, SeatState

#: How many random numbers of a request the host sends at a time.
UNIFORMS = 64


class DeviceSeats:
    """Holds the tensors on a device that decode steps read, with an entry for each seat (a place in the batch).

    Also keeps the host's record of the device's `positions` and `settings`.

    Attributes:
        state: the tensors. Decode steps on a GPU write `latest` and `positions`, and `apply` writes `positions` and
            `settings`. After all other passes, sampling or the host writes `latest`.
    """

    def __init__(self, seats: int, vocab: int, device: torch.device) -> None:
        latest, positions = (torch.zeros(seats, dtype=torch.int64, device=device) for _ in range(2))
        settings = torch.zeros(seats, SETTINGS + UNIFORMS, dtype=torch.float64, device=device)
        self.state = SeatState(latest, positions, settings)
        self._vocab = vocab
        self.forget()

    def forget(self) -> None:
        """Treat the device's state as unknown, since work that should have written it has failed.

        At each seat's next step, `changes` returns its position and settings, even if they are as before.
        """
        seats = len(self.state.latest)
        self._columns: list[int | None] = [None] * seats
        self._owners: list[Request | None] = [None] * seats
        self._last: list[int] = [-1] * seats  # the last column that a random number was sent for

    def changes(self, shares: Sequence[PassShare], seats: Sequence[int]) -> list[Tensor]:
        """Return the changes of the device's state that a decode step needs: the arguments of `apply`, on the host.

        Returns an empty list if nothing has to change. The host's record now counts the step as done. So the caller
        must submit `apply` with these arguments, and then the step.

        Args:
            shares: the sequences of the step, each with its request and columns.
            seats: the seat of each of these sequences.
        """
        moved: list[tuple[int, int]] = []
        new: list[int] = []
        settings: list[Sequence[float]] = []
        for share, seat in zip(shares, seats, strict=True):
            request, column = share.request, share.span.start
            if self._columns[seat] != column:
                moved.append((seat, column))
            self._columns[seat] = column + 1
            used_up = (
                not request.params.greedy and not self._last[seat] - UNIFORMS < column <= self._last[seat]
            )
            if self._owners[seat] is not request or used_up:
                new.append(seat)
                settings.append(self._settings_of(request, column))
                self._owners[seat], self._last[seat] = request, column + UNIFORMS - 1
        if not (moved or new):
            return []
        return [
            torch.tensor(moved, dtype=torch.int64).view(-1, 2),
            torch.tensor(new, dtype=torch.int64),
            torch.tensor(settings, dtype=torch.float64).view(-1, self.state.settings.shape[1]),
        ]

    def apply(self, moved: Tensor, new: Tensor, settings: Tensor) -> tuple[Tensor, ...]:
        """Write changes to the state on the device. Returns no tensors.

        Args:
            moved: [m, 2] int64, seats and the columns of their latest tokens.
            new: [n] int64, seats whose settings change.
            settings: [n, 5 + UNIFORMS] float64, the settings of the seats `new`: see `SeatState`.
        """
        self.state.positions.index_copy_(0, moved[:, 0], moved[:, 1])
        self.state.settings.index_copy_(0, new, settings)
        return ()

    def _settings_of(self, request: Request, column: int) -> Sequence[float]:
        """Return a request's row of `settings`: its sampling parameters, `column`, and random numbers for its next
        `UNIFORMS` tokens, the first of which is drawn at `column`. A greedy request needs no random numbers, so
        they are 0."""
        if request.params.greedy:
            return [*GREEDY, *[0.0] * UNIFORMS]
        *given, _ = settings_of(request, 0, self._vocab)
        return [*given, column, *map(request.next_uniform, range(UNIFORMS))]
