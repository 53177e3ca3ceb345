"""Verifies guesses in the pass that computes the token before them.

```text
                latest   guesses      sampled in each row
  row           w        x  y  z
  distribution  after w  x  y  z
  sampled       x        y  q  …      x and y were guessed right, q is the next token, the last row is dropped
```

Each row samples as ordinary decoding would if the guesses before it were the text. So the tokens are those of
ordinary decoding, whatever was guessed.
"""

from __future__ import annotations

import torch

from common.kv import Span
from common.request import Request, StepOutput
from common.runner import PassShare
from kernels.transfer import move_together
from phase9_pipelined.runner import PipelinedRunner
from phase10_speculative.config import Config


class SpeculativeRunner(PipelinedRunner):
    """Phase 9's runner. A step with guesses is committed before the next is planned."""

    config: Config

    @property
    def verifies(self) -> bool:
        """Whether a step in flight verifies guesses. No other step is in flight then."""
        return any(
            len(share.sample_at) > 1
            for step in self.state.steps
            for each in step.passes
            for share in each.shares
        )

    def decode_share(self, request: Request) -> PassShare:
        """Return the share of the latest token and of the guesses behind it. Columns of guesses count once they
        come true (`verify`); until then the next pass writes over them."""
        if not request.drafts:
            return super().decode_share(request)
        slot, rows = self.slot(request), 1 + len(request.drafts)
        column = self.pool.get_seq_len(slot)
        span = Span(slot, column, column + rows, length=column + 1)
        return PassShare(request, span, [*request.token_ids[-1:], *request.drafts], range(rows))

    def wait(self) -> None:
        if self.verifies:
            with self.telemetry.part("wait"):
                self.state.steps[-1].wait()
        else:
            super().wait()

    def settle(self) -> list[StepOutput]:
        return self.drain() if self.verifies else super().settle()

    def commit_step(self) -> list[StepOutput]:
        verified = self.state.oldest if self.verifies else None
        outputs = super().commit_step()
        if verified is not None:  # sampling has left the token of the last row there
            latest = {
                self.pool.seat(self.slot(request)): request.token_ids[-1]
                for request in verified.members
                if not request.is_terminal
            }
            with self.stream.entered():
                hosts = [torch.tensor(list(each), dtype=torch.int64) for each in (latest, latest.values())]
                self.latest.index_copy_(0, *move_together(hosts, self.latest.device))
        return outputs
