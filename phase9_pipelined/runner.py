"""Runs steps ahead of their results: step t+1 is submitted before the tokens of step t have been read.

```text
synchronous   host    [plan][launch][ wait ......... ][commit][plan][launch]
              stream                [ forward+sample ]                [ forward …
pipelined     host    [plan t][launch t][plan t+1][launch t+1][commit t][plan t+2][launch t+2]
              stream          [ forward+sample t ][ forward+sample t+1 ][ forward …
```

The next pass does not wait for the host. Sampling writes each token into an entry of `latest` on the device,
and the next forward pass reads it there. The host reads the tokens later: for text, stop decisions, outputs.

Under a grammar, the host needs the previous token to compute the mask of the next one. So it submits the
forward pass, commits the previous step while the pass computes, and only then submits the sampling.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from common.devices.streams import Pending, Stream, open_stream
from common.engine.runner import ForwardPass, Launched, PassShare, SampledPass, raise_if_fatal
from common.engine.scheduling import StepPlan
from common.engine.telemetry import Telemetry
from common.kv import KVPool
from common.models.layers import CausalLM, TokenBatch
from common.models.registry import weight_bytes
from common.request import RequestState, StepOutput
from common.sampling.draw import Sampled, choose
from common.sampling.inputs import SamplingInputs, is_ordered
from kernels.decode_rows import decode_rows_triton
from kernels.dispatch import use_triton
from kernels.draw import draw_at_seats_triton
from kernels.penalties import penalise_triton
from kernels.transfer import move_together
from phase7_chunked.runner import ChunkedRunner
from phase9_pipelined.config import Config
from phase9_pipelined.seats import DeviceSeats
from phase9_pipelined.state import MAX_IN_FLIGHT, DecodeSlot, LaunchedPass, PipelineState

logger = logging.getLogger(__name__)

HOST = torch.device("cpu")


#: A model whose weights take at most so many bytes is small: a processor's cache holds them.
SMALL_MODEL_BYTES = 32 * 2**20


def _keep_tokens(logits: Tensor, read: Tensor, drawn: Tensor) -> tuple[Tensor]:  # noqa: ARG001 - a pass's results
    """Return a copy of a pass's drawn tokens, since the next launch of the pass's graph overwrites them."""
    return (drawn.clone(),)


def default_threads(model: CausalLM) -> int:
    """Return the number of threads that compute a pass on a CPU: all, or one less for a small model.

    A pass of a small model takes about as long as the host's work for a step, so the host gets a core of its own.
    """
    threads = torch.get_num_threads()
    is_small = weight_bytes(model.config, model.dtype) <= SMALL_MODEL_BYTES
    return max(1, threads - 1) if is_small else threads


class PipelinedRunner(ChunkedRunner):
    """Computes phase 7's passes, with up to two steps in flight."""

    config: Config
    stream: Stream

    def __init__(self, config: Config, model: CausalLM, pool: KVPool, telemetry: Telemetry) -> None:
        super().__init__(config, model, pool, telemetry)
        self.stream = open_stream(
            model.device,
            recorded=config.captured_steps and model.is_packed,
            graph_sizes=config.captured_sizes(),
            threads=config.pass_threads or default_threads(model),
        )
        self.state = PipelineState()
        self.seats = DeviceSeats(len(pool.block_tables), model.config.vocab_size, model.device)
        # [seats] int64: the latest token of each seat's sequence, on the device.
        self.latest = self.seats.state.latest

    # ------------------------------------------------------------------ the loop

    @property
    def in_flight(self) -> bool:
        return bool(self.state.steps)

    def wait(self) -> None:
        if not self.state.has_room:
            with self.telemetry.part("wait"):
                self.state.steps[0].wait()

    def settle(self) -> list[StepOutput]:
        """Commit the oldest step if `state.most` steps are in flight, to make room for one more. Returns its
        outputs; [] if no step was committed."""
        return [] if self.state.has_room else self.commit_step()

    def execute(self, plan: StepPlan) -> list[StepOutput]:
        """Submit a plan's passes and their sampling. Returns the outputs of the steps that are committed meanwhile.

        Earlier steps are committed if `pipeline_depth` is below 2, or if the plan's sampling depends on their
        tokens. With `pipeline_depth` 0, the plan's own step is committed, too. An empty plan commits the
        oldest step in flight. If a prompt's log-probabilities are requested, the steps in flight are
        committed first, and the plan is executed as in phase 8.
        """
        if not (plan.decode or plan.prefill):
            return self.commit_step() if self.in_flight else []
        if any(chunk.request.params.prompt_logprobs is not None for chunk in plan.prefill):
            return self.drain() + self._execute_now(plan)  # the host reads scores while the pass runs
        outputs = self._attempt(self.launch_forward, plan)
        launched = self.state.launched  # None: the launch failed, and the step was computed again
        if launched and (self.config.pipeline_depth < MAX_IN_FLIGHT or launched.waits_for_tokens):
            while self.state.oldest:
                outputs += self.commit_step()
        if self.state.launched:  # None: the step before failed, and both were computed again
            outputs += self._attempt(self.finalize_sampling)
        return outputs if self.config.pipeline_depth > 0 else outputs + self.drain()

    def drain(self) -> list[StepOutput]:
        """Commit all steps in flight. Returns their outputs."""
        outputs: list[StepOutput] = []
        while self.in_flight:
            outputs += self.commit_step()
        return outputs

    # ------------------------------------------------------------------ launch

    def launch_forward(self, plan: StepPlan) -> None:
        """Submit the forward passes of a plan. The plan's tokens count as computed from now on."""
        step = DecodeSlot(plan)
        self.state.on_launch(step)
        for forward_pass in self.passes(plan):
            with self.stream.entered():
                step.passes.append(self._launch_one(forward_pass))

    def _launch_one(self, forward_pass: ForwardPass) -> LaunchedPass:
        shares = forward_pass.shares
        # Decoding sequences come first. Their tokens are in `latest`, those of prompts and guesses on the host.
        decoding = sum(
            share.request.state is RequestState.DECODE and len(share.sample_at) == 1 for share in shares
        )
        draws = decoding == len(shares) and use_triton(self.latest)
        if draws:
            requests, view = forward_pass.sampled_rows()[0], self.pool.view([share.span for share in shares])
            work = self._submit_decode(shares, view.layout.rows)
        else:
            requests, batch, view = self.prepare(forward_pass)
            layout = view.layout

            def forward(
                seats: Tensor, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, *_: Tensor
            ) -> tuple[Tensor]:
                batch = TokenBatch(torch.cat([self.latest[seats], token_ids]), positions, logit_rows)
                return (self.model(batch, view),)

            assert batch.logit_rows is not None, "the rows that sample"
            inputs = [layout.seats[:decoding], batch.token_ids[decoding:], batch.positions, batch.logit_rows]
            # Read by native kernels only:
            inputs += [layout.rows, layout.host.query_offsets, layout.host.kv_lengths]
            work = self.stream.submit("forward", forward, inputs, fetch=False)
        self.telemetry.current.passes += 1
        view.advance()
        self.count_as_computed(forward_pass)
        return LaunchedPass(shares, requests, work, draws)

    def _submit_decode(self, shares: Sequence[PassShare], seats: Tensor) -> Pending:
        """Submit the pass of a decode step on a GPU, for the sequences at `seats` [B] (on the host).

        If a seat's state on the device is not what the step needs, its change is submitted before.
        """
        changes = self.seats.changes(shares, seats.tolist())
        if changes:
            sent = move_together(changes, self.model.device)
            self.stream.submit("seats", self.seats.apply, sent, fetch=False)
        requests = [share.request for share in shares]
        penalised = any(each.sampling.counts is not None for each in requests)
        # Steps with penalties always search, so there are three kinds of graphs and not four.
        ranked = penalised or any(is_ordered(each.params) and not each.params.greedy for each in requests)
        decode = functools.partial(self._decode, ranked=ranked, penalised=penalised)
        key = ("forward", "decode", ranked, penalised)
        return self.stream.submit(key, decode, [seats], fetch=False, by_row=True)

    def _decode(self, seats: Tensor, *, ranked: bool, penalised: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Run the model on the latest token of each sequence, and draw the next tokens. Everything that
        differs between two steps of the same sequences is on the device, so one captured graph computes both.

        Args:
            seats: [B] int64.
            ranked: whether to search for top-k and top-p, which takes more launches. Needed if any sequence that is
                not greedy has either.
            penalised: whether any sequence has penalties, which take two launches.

        Returns:
            The logits [B, vocab], the token ids [B] that the model has read, and the drawn token ids [B].
        """
        state = self.seats.state
        tables = self.pool.device_tables()
        rows = decode_rows_triton(seats, state.latest, state.positions, tables, self.pool.block_size)
        batch = TokenBatch(rows.token_ids, rows.positions, None)
        scores = logits = self.model(batch, self.pool.decode_view(rows))
        if penalised:
            assert self.seats.penalties is not None, "a sequence has penalties"
            scores = penalise_triton(logits, self.seats.penalties, seats, rows.token_ids)
        drawn = draw_at_seats_triton(scores, state, seats, rows.positions, ranked=ranked)
        return logits, rows.token_ids, drawn

    # ------------------------------------------------------------------ sampling

    def finalize_sampling(self) -> None:
        """Submit the sampling of the step launched last, and the copy of its tokens to the host."""
        step = self.state.launched
        assert step is not None, "a launched step"
        for each in step.passes:
            if each.requests:
                with self.stream.entered():
                    each.work = self._sample_one(each)
            for request in dict.fromkeys(each.requests):  # one token of each request is certain
                request.pending_tokens += 1
        self.state.on_pending_commit()

    def _sample_one(self, launched: LaunchedPass) -> Pending:
        requests = launched.requests
        if launched.draws and all(request.sampling.draws_at_seat for request in requests):
            return self.stream.submit(("sample", "drawn"), _keep_tokens, [], launched.work)
        inputs = SamplingInputs.of(requests, self.masks(requests), self.model.config.vocab_size, HOST)
        asked, top = inputs.tensors(), inputs.top
        seats = torch.tensor([self.pool.seat(self.slot(request)) for request in requests])
        sent = move_together([seats, *asked.values()], self.model.device)

        def sample(logits: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
            # If the pass draws, the tokens that it has read and drawn come first, and then what was sent.
            seats, *tensors = others[-len(sent) :]
            fields: dict[str, Any] = dict(zip(asked, tensors, strict=True))
            if "unread" in fields:  # a pass that draws has written over `latest`
                read = others[0] if launched.draws else self.latest[seats]
                fields["unread_ids"] = read[fields["unread"]]
            sampled = choose(logits, SamplingInputs(**fields, top=top))
            # The request of a row without a token fails when the row is read. Until then any id will do.
            self.latest.index_copy_(0, seats, sampled.token_ids.clamp(min=0))
            return tuple(each for each in sampled if each is not None)

        key = ("sample", launched.draws, top, *asked)
        return self.stream.submit(key, sample, sent, launched.work)

    # ------------------------------------------------------------------ commit

    def commit_step(self) -> list[StepOutput]:
        """Wait for the oldest step alone, read its tokens and commit them. Returns its outputs.

        If the step failed, computes all steps in flight again (`_recover`) and returns their outputs.
        """
        step = self.state.oldest
        assert step is not None, "a sampled step"
        try:
            with self.telemetry.part("wait"):
                sampled = self._read(step)
        except Exception as error:
            return self._recover(error)
        for each in step.passes:
            for request in dict.fromkeys(each.requests):
                request.pending_tokens -= 1
        with self.telemetry.part("commit"):
            outputs = self.commit(Launched(step.plan, sampled))
        self.state.on_step_completed(step)
        return outputs

    def _read(self, step: DecodeSlot) -> list[SampledPass]:
        """Wait for a step's passes and return their sampled tokens. Raises the error of a pass that failed."""
        return [SampledPass(each.requests, Sampled(*each.work.wait())) for each in step.passes]

    # ------------------------------------------------------------------ failure

    def _attempt(self, stage: Callable[..., None], *arguments: Any) -> list[StepOutput]:
        """Run a stage of a launch. If the stage raises, return the outputs of `_recover`, else [].

        Raises:
            EngineDeadError: the device failed.
        """
        try:
            with self.telemetry.part("launch"):
                stage(*arguments)
        except Exception as error:
            return self._recover(error)
        return []

    def _recover(self, error: Exception) -> list[StepOutput]:
        """Abandon the steps in flight and compute them again, one after the other. Returns their outputs.

        If a request causes the error again, it fails alone: see `_launch_pass`. All other requests get the
        tokens that they would have got without the error.

        Raises:
            EngineDeadError: the device failed.
        """
        raise_if_fatal(error)
        self.telemetry.counters.failed_passes += 1
        logger.warning("a step failed, computing what was in flight again: %r", error)
        steps = tuple(self.state.steps)
        self.abandon()
        return [output for step in steps for output in self._execute_now(step.plan)]

    def _execute_now(self, plan: StepPlan) -> list[StepOutput]:
        """Execute a plan as phase 8 does, when nothing is in flight. Requests that have ended are left out."""
        plan = plan.without_ended()
        outputs = super().execute(plan)
        self.put_back_latest(plan)
        return outputs

    def put_back_latest(self, plan: StepPlan) -> None:
        """Write the latest token of each request of a plan that has not ended to `latest`, where the next pass
        reads it.

        Nothing may be in flight.
        """
        requests = [request for request in plan.requests if not request.is_terminal]
        seats = torch.tensor([self.pool.seat(self.slot(request)) for request in requests], dtype=torch.int64)
        token_ids = torch.tensor([request.token_ids[-1] for request in requests], dtype=torch.int64)
        with self.stream.entered():
            self.latest.index_copy_(0, *move_together([seats, token_ids], self.latest.device))

    def launch(self, plan: StepPlan) -> Launched:
        return self.stream.call(functools.partial(super().launch, plan))

    def abandon(self) -> None:
        """Wait until the steps in flight have stopped computing, then drop them and rewind their requests.

        The requests get back the lengths that they had before the oldest step. If `abandon` is interrupted, it may
        be called again.
        """
        with suppress(Exception):  # if the device failed, nothing can be waited for
            self.stream.drain()
        for step in self.state.steps:
            step.wait()  # takes the results, which a tape's player would keep
            for each in step.passes:
                self.rewind(each.shares)
        self.state.drop_all()
        self.seats.forget()
