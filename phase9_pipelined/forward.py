"""Forward passes as functions of tensors, whose next tokens are where the step before has left them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from common.kv import KVPool, KVView
from common.models.layers import CausalLM, TokenBatch
from common.runner import ForwardPass
from common.streams import Pending, Stream
from kernels.dispatch import use_triton
from kernels.transfer import to_device
from phase9_pipelined.slots import LaunchedPass


class Forwards(NamedTuple):
    """Hands in forward passes.

    Attributes:
        latest: [seats] int64, on the device: the latest token of each seat's sequence.
    """

    model: CausalLM
    pool: KVPool
    latest: Tensor

    def submit(self, stream: Stream, forward_pass: ForwardPass, view: KVView) -> LaunchedPass:
        """Hand in one pass, over the spans that `view` was made of."""
        requests = tuple(share.request for share in forward_pass.shares if share.sample_at is not None)
        if use_triton(self.latest) and not any(share.token_ids for share in forward_pass.shares):
            return LaunchedPass(requests, self._submit_decode(stream, forward_pass))
        return LaunchedPass(requests, self._submit_any(stream, forward_pass, view))

    def _submit_any(self, stream: Stream, forward_pass: ForwardPass, view: KVView) -> Pending:
        """Those who decode come first, and read their tokens from `latest`."""
        seats: list[int] = []
        token_ids: list[int] = []
        logit_rows: list[int] = []
        for share in forward_pass.shares:
            if share.sample_at is not None:
                logit_rows.append(len(seats) + len(token_ids) + share.sample_at)
            if share.token_ids:
                token_ids += share.token_ids
            else:
                seats.append(self.pool.seat(share.span.slot))

        def forward(
            seats: Tensor, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, *_: Tensor
        ) -> tuple[Tensor]:
            batch = TokenBatch(torch.cat([self.latest[seats], token_ids]), positions, logit_rows)
            return (self.model(batch, view),)

        layout = view.layout
        # A pass nobody samples from still names a row. The last three are read by the native kernels alone.
        inputs = [self.moved(each) for each in (seats, token_ids)]
        inputs += [view.positions, self.moved(logit_rows or [0])]
        inputs += [layout.rows, layout.host.query_offsets, layout.host.kv_lengths]
        return stream.submit("forward", forward, inputs, fetch=False)

    def _submit_decode(self, stream: Stream, forward_pass: ForwardPass) -> Pending:
        """A token of each: all there is to know in one tensor, in a form that a graph on a GPU takes.

        [B, 2 + N] int64: seat, columns once this pass has written its own, block table.
        """
        spans = [share.span for share in forward_pass.shares]
        seats = torch.tensor([self.pool.seat(span.slot) for span in spans])
        lengths = torch.tensor([span.end for span in spans])
        tables = self.pool.block_tables.index_select(0, seats)
        indices = torch.cat([seats.unsqueeze(1), lengths.unsqueeze(1), tables], dim=1)
        return stream.submit("decode", self._decode, [indices], fetch=False, by_row=True)

    def _decode(self, indices: Tensor) -> tuple[Tensor]:
        seats, lengths, tables = indices[:, 0], indices[:, 1].contiguous(), indices[:, 2:]
        view = self.pool.decode_view(tables, lengths)
        every_row = torch.arange(len(indices), device=indices.device)
        return (self.model(TokenBatch(self.latest[seats], view.positions, every_row), view),)

    def moved(self, values: list[int]) -> Tensor:
        """Copy values to the model's device without blocking."""
        return to_device(torch.tensor(values, dtype=torch.int64), self.latest.device)
