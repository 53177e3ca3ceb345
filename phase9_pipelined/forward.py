"""Submits forward passes that read their input tokens on the device, where the previous step wrote them."""

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
    """Submits forward passes.

    Attributes:
        latest: [seats] int64, on the device: the latest token of each seat's sequence.
    """

    model: CausalLM
    pool: KVPool
    latest: Tensor

    def submit(self, stream: Stream, forward_pass: ForwardPass, view: KVView) -> LaunchedPass:
        """Submit one pass over the spans of `view`. Shares without token ids come first and read `latest`."""
        requests, logit_rows = forward_pass.sampled_rows()
        if use_triton(self.latest) and not any(share.token_ids for share in forward_pass.shares):
            return LaunchedPass(requests, self._submit_decode(stream, forward_pass))
        seats = [self.pool.seat(share.span.slot) for share in forward_pass.shares if not share.token_ids]
        token_ids = [token_id for share in forward_pass.shares for token_id in share.token_ids]

        def forward(
            seats: Tensor, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, *_: Tensor
        ) -> tuple[Tensor]:
            batch = TokenBatch(torch.cat([self.latest[seats], token_ids]), positions, logit_rows)
            return (self.model(batch, view),)

        layout = view.layout
        # A pass without sampled rows still names a row. The last three inputs are read by the native kernels alone.
        inputs = [self.moved(seats), self.moved(token_ids), view.positions, self.moved(logit_rows or [0])]
        inputs += [layout.rows, layout.host.query_offsets, layout.host.kv_lengths]
        return LaunchedPass(requests, stream.submit("forward", forward, inputs, fetch=False))

    def _submit_decode(self, stream: Stream, forward_pass: ForwardPass) -> Pending:
        """Submit one token of each sequence, all inputs in one tensor: the form that a graph on a GPU takes.

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
