"""Steps ahead of their results: step t+1 is submitted before the tokens of step t have been read.

```text
synchronous   host    [plan][launch][ wait ......... ][commit][plan][launch]
              stream                [ forward+sample ]                [ forward …
pipelined     host    [plan t][launch t][plan t+1][launch t+1][commit t][plan t+2][launch t+2]
              stream          [ forward+sample t ][ forward+sample t+1 ][ forward …
```

The next tokens never visit the host: choosing them writes each into a row of `latest`, and the next forward pass
reads it there. The host reads them later, for text, stop decisions and outputs.

| step by step | what it does |
| --- | --- |
| `launch_forward` | takes references, submits the forward passes, advances lengths |
| `finalize_sampling` | submits the sampling |
| `commit_step` | waits for that step's tokens, then does what every phase's `commit` does |

Where a choice depends on the token before it (grammars, penalties), the step before is committed between the first
and the second: the forward pass computes meanwhile.

A step that fails is computed again, and so is the one launched behind it: this time without running ahead, and a
pass that fails again is bisected.
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
from phase7_chunked.runner import ChunkedRunner
from phase9_pipelined.config import Config
from phase9_pipelined.forward import Forwards
from phase9_pipelined.slots import DecodeSlot, LaunchedPass
from phase9_pipelined.state import SLOTS, PipelineState
from phase9_pipelined.warm_up import capture, warm_up

logger = logging.getLogger(__name__)


class PipelinedRunner(ChunkedRunner):
    """Phase 7's passes, up to two steps of them in flight."""

    config: Config

    def __init__(self, config: Config, model: CausalLM, pool: KVPool, telemetry: Telemetry) -> None:
        super().__init__(config, model, pool, telemetry)
        recorded = config.captured_steps and (model.is_packed or model.device.type == "cuda")
        self.stream = open_stream(model.device, recorded=recorded)
        self.state = PipelineState()
        self.slots = [DecodeSlot() for _ in range(SLOTS)]
        self._has_read = False  # whether the present step of the engine has committed one already
        # [seats] int64: the latest token of each seat's sequence, written and read by the stream.
        self.latest = torch.zeros(len(pool.block_tables), dtype=torch.int64, device=model.device)
        self.forwards = Forwards(model, pool, self.latest)

    # ------------------------------------------------------------------ the loop

    @property
    def in_flight(self) -> bool:
        return self.state.in_flight > 0

    def wait(self) -> None:
        if self.state.free_slot_id() is None and self.state.oldest is not None:
            with self.telemetry.part("wait"):
                self.slots[self.state.oldest].wait()

    def settle(self) -> list[StepOutput]:
        """Commit the oldest step if both slots are taken: the next one needs a slot."""
        self._has_read = self.state.free_slot_id() is None
        return self.commit_step() if self._has_read else []

    def execute(self, plan: StepPlan) -> list[StepOutput]:
        slot_id = self.schedule_decode_step(plan)
        if slot_id is None:  # what this step has read already is not to wait for what comes next
            return self.commit_step() if self.in_flight and not self._has_read else []
        outputs = self._attempt(self.launch_forward, plan, slot_id)
        if self.config.pipeline_depth < SLOTS or self.slots[slot_id].waits_for_tokens:
            while self.state.oldest is not None:
                outputs += self.commit_step()
        if self.state.launched == slot_id:  # unless a step failed, and this one with it
            outputs += self._attempt(self.finalize_sampling, slot_id)
        return outputs if self.config.pipeline_depth > 0 else outputs + self.drain()

    def schedule_decode_step(self, plan: StepPlan) -> int | None:
        """The slot in which `plan` is to run; None if there is nothing to launch. Changes nothing."""
        return self.state.free_slot_id() if plan.decode or plan.prefill else None

    def drain(self) -> list[StepOutput]:
        """Commit all steps in flight. Returns their outputs."""
        outputs: list[StepOutput] = []
        while self.in_flight:
            outputs += self.commit_step()
        return outputs

    def warm_up(self) -> None:
        if isinstance(self.stream, TapeStream):
            warm_up(self, self.stream, self.config.pass_threads)
        elif isinstance(self.stream, CudaStream) and self.stream.captures:
            capture(self)

    # ------------------------------------------------------------------ launch

    def launch_forward(self, plan: StepPlan, slot_id: int) -> None:
        """Hand in the forward passes of a plan. Its sequences count as computed from now on."""
        slot = self.slots[slot_id]
        slot.begin(plan, list(self.passes(plan)))
        self.state.on_launch(slot_id, [share.request for share in slot.shares])
        for forward_pass in slot.passes:
            with self.stream.entered():
                slot.launched.append(self._launch_one(forward_pass))

    def passes(self, plan: StepPlan) -> Iterable[ForwardPass]:
        passes = super().passes(plan)
        if all(chunk.request.params.prompt_logprobs is None for chunk in plan.prefill):
            return passes
        return itertools.chain.from_iterable(map(_apart, passes))

    def decode_share(self, request: Request) -> PassShare:
        """Its token is where the step before has left it."""
        return super().decode_share(request)._replace(token_ids=())

    def _launch_one(self, forward_pass: ForwardPass) -> LaunchedPass:
        first = forward_pass.shares[0]
        if scored_columns(first.request, first.span):  # then all of them are: see `_apart`
            requests, logits = self.stream.call(functools.partial(self.forward, forward_pass))
            return LaunchedPass(requests, Done((logits,)))
        view = self.pool.view([share.span for share in forward_pass.shares])
        launched = self.forwards.submit(self.stream, forward_pass, view)
        self.telemetry.current.passes += 1
        view.advance()
        self.count_as_computed(forward_pass)
        return launched

    # ------------------------------------------------------------------ sampling

    def finalize_sampling(self, slot_id: int) -> None:
        """Hand in the choice of a launched step's tokens, and their way to the host."""
        for each in self.slots[slot_id].launched:
            if each.requests:
                with self.stream.entered():
                    each.sampled = self._sample_one(each)
        for share in self.slots[slot_id].shares:
            share.request.pending_tokens += share.sample_at is not None
        self.state.on_pending_commit(slot_id)

    def _sample_one(self, launched: LaunchedPass) -> Pending:
        requests = launched.requests
        vocab, device = self.model.config.vocab_size, self.model.device
        inputs = SamplingInputs.of(requests, self.masks(requests), vocab, device)
        given = {name: value for name, value in inputs._asdict().items() if isinstance(value, Tensor)}
        names, top = tuple(given), inputs.top
        seats = self.forwards.moved([self.pool.seat(self.slot(request)) for request in requests])

        def sample(logits: Tensor, seats: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            fields: dict[str, Any] = dict(zip(names, tensors, strict=True))
            sampled = choose(logits, SamplingInputs(**fields, top=top))
            # What is no token ends its request when it is read; until then any will do.
            self.latest.index_copy_(0, seats, sampled.token_ids.clamp(min=0))
            return tuple(each for each in sampled if each is not None)

        key = ("sample", top, *names)
        return self.stream.submit(key, sample, [seats, *given.values()], launched.forward)

    # ------------------------------------------------------------------ commit

    def commit_step(self) -> list[StepOutput]:
        """Read the oldest step's tokens and commit them. Returns its outputs. Waits for that step alone."""
        slot_id = self.state.pop_oldest()
        slot = self.slots[slot_id]
        try:
            with self.telemetry.part("wait"):
                results = self._read(slot)
        except Exception as error:
            return self._recover(error)
        launched = Launched(slot.plan)
        for each, result in zip(slot.launched, results, strict=True):
            if each.requests:
                launched.sampled.append(SampledPass(each.requests, Sampled(*result)))
        for share in slot.shares:
            share.request.pending_tokens -= share.sample_at is not None
        with self.telemetry.part("commit"):
            outputs = self.commit(launched)
        self.state.on_step_completed(slot_id)
        slot.clear()
        return outputs

    def _read(self, slot: DecodeSlot) -> list[tuple[Tensor, ...]]:
        """Return the results of a step's passes. Raises what a pass raised."""
        return [each.outcome.wait() for each in slot.launched]

    def register_prefixes(self, plan: StepPlan) -> None:
        if plan.prefill:
            self.stream.aside(functools.partial(super().register_prefixes, plan))

    def release(self, requests: Iterable[Request]) -> None:
        held = list(requests)
        if held:
            self.stream.aside(functools.partial(super().release, held))

    # ------------------------------------------------------------------ who wants to see

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
        slots = [self.slots[slot_id] for slot_id in self.state.in_order()]
        steps = [(slot.plan, slot.passes) for slot in slots]
        self.abandon()
        outputs: list[StepOutput] = []
        for plan, passes in steps:
            launched = Launched(plan)
            for forward_pass in passes:
                shares = tuple(map(_with_token_ids, forward_pass.shares))
                again = ForwardPass(tuple(share for share in shares if not share.request.is_terminal))
                if again.shares:
                    self.stream.call(functools.partial(self._launch_pass, again, launched))
            with self.telemetry.part("commit"):
                outputs += self.commit(launched)
        recovered = [share for _, passes in steps for each in passes for share in each.shares]
        self.stream.call(functools.partial(self._put_back_latest, recovered))
        return outputs

    def abandon(self) -> None:
        """Forget the steps in flight, once nothing computes for them. Their requests are as before the older step.

        May be repeated if it was interrupted.
        """
        with suppress(Exception):  # of a device that failed, nothing can be waited for
            self.stream.drain()
        for slot in self.slots:
            slot.wait()  # collects what was computed
            for request, span, _, _ in slot.shares:
                length = min(span.start, self.pool.get_seq_len(span.slot))
                self.pool.advance([span._replace(length=length)])
                request.prefill_progress = length
                request.pending_tokens = 0
        self.state.drop_all()
        for slot in self.slots:
            slot.clear()

    def _put_back_latest(self, shares: Sequence[PassShare]) -> None:
        """Write the requests' latest tokens to where the next step reads them."""
        for share in shares:
            self.latest[self.pool.seat(share.span.slot)] = share.request.token_ids[-1]


def _with_token_ids(share: PassShare) -> PassShare:
    """The share with its input tokens on the host: those of the step before have been read by now."""
    return share._replace(token_ids=share.request.token_ids[share.span.start : share.span.end])


def _apart(forward_pass: ForwardPass) -> Iterable[ForwardPass]:
    """Give the shares that score their prompts a pass of their own, which the host waits for."""
    told: list[PassShare] = []
    others: list[PassShare] = []
    for share in forward_pass.shares:
        (told if scored_columns(share.request, share.span) else others).append(share)
    return (ForwardPass(tuple(shares)) for shares in (others, told) if shares)
