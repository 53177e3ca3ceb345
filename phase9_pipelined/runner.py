"""Steps ahead of their results: step t+1 is submitted before the tokens of step t have been read.

```text
synchronous   host    [plan][launch][ wait ......... ][commit][plan][launch]
              stream                [ forward+sample ]                [ forward …
pipelined     host    [plan t][launch t][plan t+1][launch t+1][commit t][plan t+2][launch t+2]
              stream          [ forward+sample t ][ forward+sample t+1 ][ forward …
```

The next tokens never visit the host. Sampling writes each into a row of `latest`, and the next forward pass reads
it there. The host reads them later, for text, stop decisions and outputs.

| stage of a step | what it does |
| --- | --- |
| `launch_forward` | takes references, submits the forward passes, advances lengths |
| `finalize_sampling` | submits the sampling |
| `commit_step` | waits for the oldest step's tokens, then does what every phase's `commit` does |

Where a choice depends on the token before it (grammars, penalties), the step before is committed between the first
and the second stage. The forward pass computes meanwhile.

If a step fails, it and the step launched behind it are computed again, without running ahead. A pass that fails
again is bisected.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from common.kv import KVPool
from common.models.layers import CausalLM
from common.prompt_scores import scored_columns
from common.request import Request, StepOutput
from common.runner import ForwardPass, Launched, PassShare, SampledPass, raise_if_fatal
from common.sampling import Sampled, SamplingInputs, choose
from common.scheduling import StepPlan
from common.streams import CudaStream, Done, Pending, TapeStream, open_stream
from common.telemetry import Part, Telemetry
from common.warm_up import capture, record
from phase7_chunked.runner import ChunkedRunner
from phase9_pipelined.config import Config
from phase9_pipelined.forward import Forwards
from phase9_pipelined.slots import DecodeSlot, LaunchedPass
from phase9_pipelined.state import MAX_IN_FLIGHT, PipelineState

logger = logging.getLogger(__name__)


class PipelinedRunner(ChunkedRunner):
    """Phase 7's passes, up to two steps of them in flight."""

    config: Config

    def __init__(self, config: Config, model: CausalLM, pool: KVPool, telemetry: Telemetry) -> None:
        super().__init__(config, model, pool, telemetry)
        recorded = config.captured_steps and (model.is_packed or model.device.type == "cuda")
        self.stream = open_stream(model.device, recorded=recorded)
        self.state = PipelineState[DecodeSlot]()
        # [seats] int64: the latest token of each seat's sequence, written and read by the stream.
        self.latest = torch.zeros(len(pool.block_tables), dtype=torch.int64, device=model.device)
        self.forwards = Forwards(model, pool, self.latest)

    # ------------------------------------------------------------------ the loop

    @property
    def in_flight(self) -> bool:
        return bool(self.state.steps)

    def wait(self) -> None:
        if not self.state.has_room:
            with self.telemetry.part("wait"):
                self.state.steps[0].wait()

    def settle(self) -> list[StepOutput]:
        """Commit the oldest step if two are in flight: no third one may be launched."""
        return [] if self.state.has_room else self.commit_step()

    def execute(self, plan: StepPlan) -> list[StepOutput]:
        if not (plan.decode or plan.prefill):
            return self.commit_step() if self.in_flight else []
        outputs = self._attempt(self.launch_forward, plan)
        launched = self.state.launched  # None: its launch failed, and it was computed again
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

    def warm_up(self) -> None:
        if isinstance(self.stream, TapeStream):
            record(self, self.stream, self.config.pass_threads)
        elif isinstance(self.stream, CudaStream) and self.stream.captures:
            capture(self)

    # ------------------------------------------------------------------ launch

    def launch_forward(self, plan: StepPlan) -> None:
        """Submit the forward passes of a plan. Its sequences count as computed from now on."""
        step = DecodeSlot(plan, tuple(self.passes(plan)))
        self.state.on_launch(step)
        for forward_pass in step.passes:
            with self.stream.entered():
                step.launched.append(self._launch_one(forward_pass))

    def passes(self, plan: StepPlan) -> Iterable[ForwardPass]:
        passes = super().passes(plan)
        if all(chunk.request.params.prompt_logprobs is None for chunk in plan.prefill):
            return passes
        return itertools.chain.from_iterable(map(_scored_apart, passes))

    def decode_share(self, request: Request) -> PassShare:
        """The share of one token that the pass reads from `latest`."""
        return super().decode_share(request)._replace(token_ids=())

    def _launch_one(self, forward_pass: ForwardPass) -> LaunchedPass:
        first = forward_pass.shares[0]
        if scored_columns(first.request, first.span):  # then every share is scored: see `_scored_apart`
            requests, logits = self.stream.call(functools.partial(self.forward, forward_pass))
            return LaunchedPass(requests, Done((logits,)))
        view = self.pool.view([share.span for share in forward_pass.shares])
        launched = self.forwards.submit(self.stream, forward_pass, view)
        self.telemetry.current.passes += 1
        view.advance()
        self.count_as_computed(forward_pass)
        return launched

    # ------------------------------------------------------------------ sampling

    def finalize_sampling(self) -> None:
        """Submit the sampling of the launched step, and the copy of its tokens to the host."""
        step = self.state.launched
        assert step is not None, "a launched step"
        for each in step.launched:
            if each.requests:
                with self.stream.entered():
                    each.sampled = self._sample_one(each)
        for share in step.shares:
            share.request.pending_tokens += len(share.sample_at)
        self.state.on_pending_commit()

    def _sample_one(self, launched: LaunchedPass) -> Pending:
        requests = launched.requests
        inputs = SamplingInputs.of(
            requests, self.masks(requests), self.model.config.vocab_size, self.model.device
        )
        asked, top = inputs.tensors(), inputs.top
        seats = self.forwards.moved([self.pool.seat(self.slot(request)) for request in requests])

        def sample(logits: Tensor, seats: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            fields: dict[str, Any] = dict(zip(asked, tensors, strict=True))
            sampled = choose(logits, SamplingInputs(**fields, top=top))
            # A row without a token ends its request when it is read. Until then any token id will do.
            self.latest.index_copy_(0, seats, sampled.token_ids.clamp(min=0))
            return tuple(each for each in sampled if each is not None)

        key = ("sample", top, *asked)
        return self.stream.submit(key, sample, [seats, *asked.values()], launched.forward)

    # ------------------------------------------------------------------ commit

    def commit_step(self) -> list[StepOutput]:
        """Read the oldest step's tokens and commit them. Returns its outputs. Waits for that step alone."""
        step = self.state.oldest
        assert step is not None, "a sampled step"
        try:
            with self.telemetry.part("wait"):
                results = self._read(step)
        except Exception as error:
            return self._recover(error)
        sampled = [
            SampledPass(each.requests, Sampled(*result))
            for each, result in zip(step.launched, results, strict=True)
        ]
        for share in step.shares:
            share.request.pending_tokens -= len(share.sample_at)
        with self.telemetry.part("commit"):
            outputs = self.commit(Launched(step.plan, sampled))
        self.state.on_step_completed(step)
        return outputs

    def _read(self, step: DecodeSlot) -> list[tuple[Tensor, ...]]:
        """Return the results of a step's passes. Raises what a pass raised."""
        return [each.outcome.wait() for each in step.launched]

    def register_prefixes(self, plan: StepPlan) -> None:
        if plan.prefill:
            self.stream.aside(functools.partial(super().register_prefixes, plan))

    def release(self, requests: Iterable[Request]) -> None:
        held = list(requests)
        if held:
            self.stream.aside(functools.partial(super().release, held))

    # ------------------------------------------------------------------ timing

    def time_stream(self, wanted: bool) -> None:
        self.stream.time_work(wanted)

    def take_stream_parts(self) -> list[Part]:
        forward = ("forward", "decode")
        return [
            Part("stream", "forward" if work.key in forward else "sample", work.began_s, work.ended_s)
            for work in self.stream.take_times()
        ]

    # ------------------------------------------------------------------ failure

    def _attempt(self, stage: Callable[..., None], *arguments: Any) -> list[StepOutput]:
        """Run a stage of a launch. If it raises, return the outputs of the recovery."""
        try:
            with self.telemetry.part("launch"):
                stage(*arguments)
        except Exception as error:
            return self._recover(error)
        return []

    def _recover(self, error: Exception) -> list[StepOutput]:
        """Abandon the steps in flight and compute them again, one after the other. Returns their outputs.

        Guilty requests fail again, and alone: see `_launch_pass`. All others get the tokens they would have got.
        """
        raise_if_fatal(error)
        self.telemetry.counters.failed_passes += 1
        logger.warning("a step failed, computing what was in flight again: %r", error)
        steps = tuple(self.state.steps)
        self.abandon()
        outputs: list[StepOutput] = []
        for step in steps:
            launched = Launched(step.plan)
            for forward_pass in step.passes:
                shares = map(_with_token_ids, forward_pass.shares)
                again = ForwardPass(tuple(share for share in shares if not share.request.is_terminal))
                if again.shares:
                    self.stream.call(functools.partial(self._launch_pass, again, launched))
            with self.telemetry.part("commit"):
                outputs += self.commit(launched)
        shares_of_all = [share for step in steps for share in step.shares]
        self.stream.call(functools.partial(self._put_back_latest, shares_of_all))
        return outputs

    def abandon(self) -> None:
        """Forget the steps in flight, once nothing computes for them. Their requests are as before the older step.

        May be repeated if it was interrupted.
        """
        with suppress(Exception):  # if the device failed, nothing can be waited for
            self.stream.drain()
        for step in self.state.steps:
            step.wait()  # collects what was computed
            for share in step.shares:
                request, span = share.request, share.span
                length = min(span.start, self.pool.get_seq_len(span.slot))
                self.pool.advance([span._replace(length=length)])
                request.prefill_progress = length
                request.pending_tokens = 0
        self.state.drop_all()

    def _put_back_latest(self, shares: Sequence[PassShare]) -> None:
        """Write the requests' latest tokens to where the next step reads them."""
        for share in shares:
            self.latest[self.pool.seat(share.span.slot)] = share.request.token_ids[-1]


def _with_token_ids(share: PassShare) -> PassShare:
    """The share with its input tokens on the host: the tokens of the step before have been read by now."""
    return share._replace(token_ids=share.request.token_ids[share.span.start : share.span.end])


def _scored_apart(forward_pass: ForwardPass) -> Iterable[ForwardPass]:
    """Give the shares that score their prompts a pass of their own, which the host waits for."""
    scored: list[PassShare] = []
    others: list[PassShare] = []
    for share in forward_pass.shares:
        (scored if scored_columns(share.request, share.span) else others).append(share)
    return (ForwardPass(tuple(shares)) for shares in (others, scored) if shares)
