"""Verifies guesses in the pass that computes the token before them.

```text
                latest   guesses      sampled in each row
  row           w        x  y  z
  distribution  after w  x  y  z
  sampled       x        y  q  …      x and y were guessed right, q is the next token, the last row is dropped
```

Each row samples as ordinary decoding would if the guesses before the row were part of the text. So, apart
from rounding (`kernels.batch_invariance`), the tokens are those of ordinary decoding, whatever was guessed.
"""

from __future__ import annotations

from common.engine.runner import Launched, PassShare
from common.engine.scheduling import StepPlan
from common.kv import Span
from common.request import Request, StepOutput
from phase9_pipelined.runner import PipelinedRunner
from phase9_pipelined.state import MAX_IN_FLIGHT


class SpeculativeRunner(PipelinedRunner):
    """Phase 9's runner, but a step with guesses is committed before the next step is planned."""

    def decode_share(self, request: Request) -> PassShare:
        """Return a request's part of the pass: its latest token and the guesses after it. A guess's column counts
        as part of the sequence once the guess has come true (`verify`). Otherwise the next pass writes over it."""
        guesses = request.drafts.token_ids
        if not guesses:
            return super().decode_share(request)
        slot, rows = self.slot(request), 1 + len(guesses)
        column = self.pool.get_seq_len(slot)
        span = Span(slot, column, column + rows, length=column + 1)
        return PassShare(request, span, [*request.token_ids[-1:], *guesses], range(rows))

    def execute(self, plan: StepPlan) -> list[StepOutput]:
        self.state.most = 1 if plan.verifies else MAX_IN_FLIGHT
        return super().execute(plan)

    def commit(self, launched: Launched) -> list[StepOutput]:
        outputs = super().commit(launched)
        if launched.plan.verifies:  # `latest` holds the token of the last row
            self.put_back_latest(launched.plan)
        return outputs
