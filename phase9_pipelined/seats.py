"""The state that a GPU holds for each seat (a place in the batch), and the changes that the host sends.

A decode step needs each sequence's latest token, its length, its sampling parameters and a random number. With
penalties, it also needs the counts of the sequence's tokens. Nearly all of it is on the device already: the step
before drew the token and advanced the length, each step counts the token that it reads, and parameters never
change. So the host keeps a record of the state that the device will have once all submitted work is done. It
compares this record with the needs of the next step, and sends the difference:

| sent | when |
| --- | --- |
| a length | the recorded length differs: passes with prompts or guesses advance no lengths on the device |
| parameters and `UNIFORMS` random numbers | a request is new at its seat, or has used up its numbers |
| penalties, and the tokens that they apply to | a request is new at its seat |
| tokens that the device has not counted | the request has penalties, and its recorded length differs |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.engine.runner import PassShare
from common.request import Request
from common.sampling.inputs import GREEDY, settings_of
from kernels.draw import SETTINGS, SeatState
from kernels.penalties import IN_PROMPT, NONE, SeatPenalties

#: How many random numbers of a request the host sends at a time.
UNIFORMS = 64


class DeviceSeats:
    """Holds the tensors on a device that decode steps read, with an entry for each seat (a place in the batch).

    Also keeps the host's record of the device's `positions`, `settings` and `penalties`.

    Attributes:
        state: the tensors. Decode steps on a GPU write `latest` and `positions`, and `apply` writes `positions` and
            `settings`. After all other passes, sampling or the host writes `latest`.
        penalties: the penalties and token counts of all seats. `apply` and decode steps on a GPU write them. None
            until a request with penalties decodes on a GPU. (The warm-up decodes some if it captures graphs.)
    """

    def __init__(self, seats: int, vocab: int, device: torch.device) -> None:
        latest, positions = (torch.zeros(seats, dtype=torch.int64, device=device) for _ in range(2))
        settings = torch.zeros(seats, SETTINGS + UNIFORMS, dtype=torch.float64, device=device)
        self.state = SeatState(latest, positions, settings)
        self.penalties: SeatPenalties | None = None
        self._vocab = vocab
        self.forget()

    def forget(self) -> None:
        """Treat the device's state as unknown, since work that should have written it has failed.

        At each seat's next step, `changes` returns its whole state, even if it is as before.
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
        replaced: list[int] = []
        factors: list[Sequence[float]] = []
        counted = [np.empty((0, 3), dtype=np.int64)]
        if self.penalties is None and any(share.request.sampling.counts is not None for share in shares):
            self.penalties = SeatPenalties.none(len(self._owners), self._vocab, self.state.latest.device)
        for share, seat in zip(shares, seats, strict=True):
            request, column = share.request, share.span.start
            before, is_new = self._columns[seat], self._owners[seat] is not request
            if before != column:
                moved.append((seat, column))
            if self.penalties is not None:
                if is_new:
                    replaced.append(seat)
                    factors.append(request.params.penalties)
                if request.sampling.counts is not None and (is_new or before != column):
                    counted.append(_uncounted(request, seat, None if is_new else before, column))
            self._columns[seat] = column + 1
            used_up = (
                not request.params.greedy and not self._last[seat] - UNIFORMS < column <= self._last[seat]
            )
            if is_new or used_up:
                new.append(seat)
                settings.append(self._settings_of(request, column))
                self._owners[seat], self._last[seat] = request, column + UNIFORMS - 1
        if not (moved or new):
            return []
        return [
            torch.tensor(moved, dtype=torch.int64).view(-1, 2),
            torch.tensor(new, dtype=torch.int64),
            torch.tensor(settings, dtype=torch.float64).view(-1, self.state.settings.shape[1]),
            torch.tensor(replaced, dtype=torch.int64),
            torch.tensor(factors, dtype=torch.float64).view(-1, len(NONE)),
            torch.from_numpy(np.concatenate(counted)),
        ]

    def apply(
        self, moved: Tensor, new: Tensor, settings: Tensor, replaced: Tensor, factors: Tensor, counted: Tensor
    ) -> tuple[Tensor, ...]:
        """Write changes to the state on the device. Returns no tensors.

        Args:
            moved: [m, 2] int64, seats and the columns of their latest tokens.
            new: [n] int64, seats whose settings change.
            settings: [n, 5 + UNIFORMS] float64, the settings of the seats `new`: see `SeatState`.
            replaced: [r] int64, seats that have a new request; empty without `penalties`.
            factors: [r, 3] float64, the factors of the seats `replaced`: see `SeatPenalties`.
            counted: [c, 3] int64, seats, tokens, and the numbers to add to these tokens' counts.
        """
        self.state.positions.index_copy_(0, moved[:, 0], moved[:, 1])
        self.state.settings.index_copy_(0, new, settings)
        if self.penalties is not None:
            self.penalties.factors.index_copy_(0, replaced, factors)
            counts = self.penalties.counts.index_fill_(0, replaced, 0)
            counts.index_put_((counted[:, 0], counted[:, 1]), counted[:, 2].int(), accumulate=True)
        return ()

    def _settings_of(self, request: Request, column: int) -> Sequence[float]:
        """Return a request's row of `settings`: its sampling parameters, `column`, and random numbers for its next
        `UNIFORMS` tokens, the first of which is drawn at `column`. A greedy request needs no random numbers, so
        they are 0."""
        if request.params.greedy:
            return [*GREEDY, *[0.0] * UNIFORMS]
        *given, _ = settings_of(request, 0, self._vocab)
        return [*given, column, *map(request.next_uniform, range(UNIFORMS))]


def _uncounted(request: Request, seat: int, before: int | None, column: int) -> npt.NDArray[np.int64]:
    """Return the seat's rows of `counted` (see `DeviceSeats.apply`) for a step that reads the token at `column`.

    The step itself counts that token.

    Args:
        request: the request at the seat, which has penalties.
        seat: its seat.
        before: the device has counted all generated tokens in the columns before this one. None: the seat has no
            counts of this request.
        column: the column of the request's latest token.
    """
    in_prompt = (
        request.prompt_token_ids if before is None and request.params.repetition_penalty != 1.0 else []
    )
    known = np.unique(np.array(in_prompt, dtype=np.int64))
    first = max(before or 0, request.num_prompt_tokens)
    generated = np.array(request.token_ids[first:column], dtype=np.int64)
    numbers = np.repeat([IN_PROMPT, 1], [len(known), len(generated)])
    tokens = np.concatenate([known, generated])
    return np.stack([np.full_like(tokens, seat), tokens, numbers], axis=1)
