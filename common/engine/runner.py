"""Runs a plan: computes forward passes on the device, then turns the sampled tokens into outputs.

In phases 4 to 8, `execute(plan) = commit(launch(plan))`. `launch` runs the forward passes and samples, all on the
device. `commit` copies the sampled ids to the host and turns them into text, stop decisions and outputs. A phase
decides which passes a plan becomes (`passes`).
"""

from __future__ import annotations

import functools
import itertools
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from common.devices.streams import Stream
from common.engine.commit import commit_token, fail, without_frames
from common.engine.config import EngineConfig
from common.engine.prompt_scores import PromptScores
from common.engine.scheduling import PrefillChunk, StepPlan
from common.engine.telemetry import Telemetry
from common.errors import EngineDeadError, GrammarFailedError, NoTokenLeftError
from common.kv import KVPool, KVView, Span
from common.models.layers import CausalLM, TokenBatch
from common.request import Request, RequestState, StepOutput, TokenLogprobs
from common.sampling.draw import Sampled, read_logprobs, sample
from common.sampling.inputs import TokenMasks

logger = logging.getLogger(__name__)

DEVICE_FAILED = "the device failed; restart the server"


class PassShare(NamedTuple):
    """The part of a forward pass that belongs to one sequence.

    Attributes:
        request: the sequence's request.
        span: the columns of the sequence that the pass computes.
        token_ids: the tokens to compute at those columns, as many as the span is long. (From phase 9 on, the device
            may know a decoding sequence's latest token before the host does. Then the device's token is computed.)
        sample_at: indices into `token_ids`, in order, of the tokens whose logits choose a next token. Usually one,
            of the sequence's last token; none if a later pass continues the prompt or the request has ended;
            several if guessed tokens are verified.
    """

    request: Request
    span: Span
    token_ids: Sequence[int]
    sample_at: range


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """Sequences that go through the model together.

    Attributes:
        shares: for each sequence, its part of the pass. Decoding sequences come first (see `AttentionLayout`).
        splittable: whether a failed pass may be tried again in halves, so that only the requests that cause the
            failure fail.
        padded_tokens: tokens that only pad prompts to the longest prompt (phase 4).
        idle_rows: decode rows of requests that have ended (phase 4).

    Raises:
        ValueError: there are no shares.
    """

    shares: tuple[PassShare, ...]
    splittable: bool = True
    padded_tokens: int = 0
    idle_rows: int = 0

    def __post_init__(self) -> None:
        if not self.shares:
            raise ValueError("a pass needs the part of at least one sequence")

    def sampled_rows(self) -> tuple[tuple[Request, ...], list[int]]:
        """Return the request of each row whose logits choose a token, and the indices of these rows in the pass."""
        requests: list[Request] = []
        rows: list[int] = []
        first_row = 0
        for share in self.shares:
            for index in share.sample_at:
                requests.append(share.request)
                rows.append(first_row + index)
            first_row += share.span.end - share.span.start
        return tuple(requests), rows

    def halves(self) -> tuple[ForwardPass, ForwardPass]:
        """Return two passes, each with half of the shares. No padding or idle rows: those were counted before."""
        middle = len(self.shares) // 2
        return ForwardPass(self.shares[:middle]), ForwardPass(self.shares[middle:])


@dataclass(frozen=True, slots=True)
class SampledPass:
    """A pass that succeeded: the request of each sampled row, in order, and the tokens, on the device or (only in
    phases 9 and 10) already on the host."""

    requests: tuple[Request, ...]
    sampled: Sampled


@dataclass(slots=True)
class Launched:
    """A launched step: its plan, the passes that succeeded, and the requests that failed, with their errors."""

    plan: StepPlan
    sampled: list[SampledPass] = field(default_factory=list)
    failed: list[tuple[Request, Exception]] = field(default_factory=list)


class Runner(ABC):
    """Owns the model and the KV pool, and runs the scheduler's plans.

    Attributes:
        stream: runs the passes while the host goes on; None: each step is committed before the next is planned.
    """

    stream: Stream | None = None

    def __init__(self, config: EngineConfig, model: CausalLM, pool: KVPool, telemetry: Telemetry) -> None:
        self.config = config
        self.model = model
        self.pool = pool
        self.telemetry = telemetry

    @abstractmethod
    def passes(self, plan: StepPlan) -> Iterable[ForwardPass]:
        """Return the forward passes of a plan, in the order they run."""

    # ------------------------------------------------------------------ shares of a pass

    def decode_share(self, request: Request) -> PassShare:
        """Return a share that computes a request's latest token, in the first column that holds no token yet."""
        slot = self.slot(request)
        column = self.pool.get_seq_len(slot)
        return PassShare(request, Span.exact(slot, column, column + 1), request.token_ids[-1:], range(1))

    def prefill_share(self, chunk: PrefillChunk) -> PassShare:
        """Return a share that computes a chunk. In a last chunk, the last token's logits choose the next token."""
        return PassShare(
            request=chunk.request,
            span=Span.exact(self.slot(chunk.request), chunk.start, chunk.end),
            token_ids=chunk.token_ids,
            sample_at=range(chunk.end - chunk.start - 1, chunk.end - chunk.start)
            if chunk.is_last
            else range(0),
        )

    @staticmethod
    def slot(request: Request) -> int:
        assert request.slot is not None, f"{request.request_id} was planned without memory"
        return request.slot

    # ------------------------------------------------------------------ a step

    @property
    def in_flight(self) -> bool:
        """Whether a launched step is not committed yet. Always False in phases 4 to 8."""
        return False

    def execute(self, plan: StepPlan) -> list[StepOutput]:
        """Run a plan and return its outputs; an empty plan is legal.

        Raises:
            EngineDeadError: the device failed, and its state is unknown.
        """
        try:
            launched = self.launch(plan)
            with self.telemetry.part("commit"):
                return self.commit(launched)
        except torch.AcceleratorError as error:  # a pass's error may appear only when its results are read
            raise EngineDeadError(DEVICE_FAILED) from error

    def wait(self) -> None:  # noqa: B027 - nothing is in flight where each step commits itself
        """If `settle` is going to commit a step, block until that step's tokens are computed."""

    def settle(self) -> list[StepOutput]:
        """Commit the steps whose tokens must be read before the next step is planned. Returns their outputs."""
        return []

    def abandon(self) -> None:  # noqa: B027 - nothing is in flight where each step commits itself
        """Wait until the steps in flight have stopped computing, then drop them. Their tokens are lost."""

    def release(self, requests: Sequence[Request]) -> None:
        """Free the memory of requests that have left the batch: they ended or were preempted."""
        for request in requests:
            self._aside(functools.partial(self.pool.release, request))

    def _aside(self, function: Callable[[], None]) -> None:
        """Call a function that touches results of finished passes only. If the stream can do so, the function runs
        without waiting for the passes in flight."""
        if self.stream is None:
            function()
        else:
            self.stream.aside(function)

    # ------------------------------------------------------------------ launch

    def launch(self, plan: StepPlan) -> Launched:
        """Run the forward passes of a plan and sample. A failed pass fails no request of another pass."""
        launched = Launched(plan)
        for forward_pass in self.passes(plan):
            record = self.telemetry.current
            record.padded_tokens += forward_pass.padded_tokens
            record.idle_rows += forward_pass.idle_rows
            self._launch_pass(forward_pass, launched)
        return launched

    def _launch_pass(self, forward_pass: ForwardPass, launched: Launched) -> None:
        """Run a pass and sample. If the pass fails and is splittable, run its halves, and so on: finding one
        failing sequence of N takes about 2 log2 N more passes."""
        try:
            requests, logits = self.forward(forward_pass)
        except Exception as error:
            raise_if_fatal(error)
            self.telemetry.counters.failed_passes += 1
            if not forward_pass.splittable or len(forward_pass.shares) == 1:
                logger.exception("a forward pass failed")
                launched.failed += [(share.request, without_frames(error)) for share in forward_pass.shares]
                return
            logger.warning("a pass of %d sequences failed, trying its halves", len(forward_pass.shares))
        else:
            with self.telemetry.part("sample"):
                self._sample(requests, logits, launched)
            return
        # Outside the `except`: inside it, the error's frames would keep the failed pass's tensors allocated.
        for half in forward_pass.halves():
            self._launch_pass(half, launched)

    def _sample(self, requests: tuple[Request, ...], logits: torch.Tensor, launched: Launched) -> None:
        """Sample the tokens of all rows of a pass together. If that raises, sample each request alone, so that only
        the requests that cause the error fail."""
        try:
            with torch.inference_mode():
                sampled = sample(logits, requests, self.masks(requests))
                launched.sampled.append(SampledPass(requests, sampled))
        except Exception as error:
            raise_if_fatal(error)
            if len(set(requests)) == 1:
                logger.exception("sampling failed")
                launched.failed.append((requests[0], without_frames(error)))
                return
        else:
            return
        ends = itertools.accumulate(Counter(requests).values())  # a request's rows are adjacent
        for request, (first, end) in zip(
            dict.fromkeys(requests), itertools.pairwise([0, *ends]), strict=True
        ):
            self._sample((request,) * (end - first), logits[first:end], launched)

    def masks(self, requests: Sequence[Request]) -> TokenMasks | None:
        """Return the masks of the tokens that may come next in each row; None if no row has a mask."""
        if not any(request.is_masked for request in requests):
            return None
        with self.telemetry.part("mask"):
            return TokenMasks.of(requests)

    def forward(self, forward_pass: ForwardPass) -> tuple[tuple[Request, ...], torch.Tensor]:
        """Run one pass through the model: compute addresses and logits, then set the sequences' new lengths.

        Returns:
            The request of each sampled row, and the logits of these rows [S, vocab].
        """
        with self.telemetry.part("pass"):
            requests, batch, view = self.prepare(forward_pass)
            scores = PromptScores.of((share.request, share.span) for share in forward_pass.shares)
            logits = scores.forward(self.model, batch, view) if scores.asked else self.model(batch, view)
            self.telemetry.current.passes += 1
            view.advance()
            self.count_as_computed(forward_pass)
            return requests, logits[: len(requests)]

    @staticmethod
    def count_as_computed(forward_pass: ForwardPass) -> None:
        """Count the pass's columns as computed. Requests whose prompt is complete move to DECODE."""
        for request, span, _, sample_at in forward_pass.shares:
            request.prefill_progress = span.length
            if sample_at and request.state is RequestState.PREFILL:
                request.start_decode()

    def rewind(self, shares: Iterable[PassShare]) -> None:
        """Set requests back to the lengths that they had before a pass whose results are lost.

        The caller must rewind all later passes, too, in any order.

        Args:
            shares: the shares of the pass.
        """
        for request, span, *_ in shares:
            length = min(span.start, self.pool.get_seq_len(span.slot))
            self.pool.advance([span._replace(length=length)])
            request.prefill_progress = length
            request.pending_tokens = 0

    def prepare(self, forward_pass: ForwardPass) -> tuple[tuple[Request, ...], TokenBatch, KVView]:
        """Return the request of each sampled row, and the batch and view that the model is called with."""
        view = self.pool.view([share.span for share in forward_pass.shares])
        requests, logit_rows = forward_pass.sampled_rows()
        token_ids = [token_id for share in forward_pass.shares for token_id in share.token_ids]
        # The head computes at least one row, also in a pass that samples nothing (chunks of prompts).
        sent = view.send(torch.tensor(token_ids), torch.tensor(logit_rows or [0]))
        return requests, TokenBatch(sent[0], view.positions, sent[1]), view

    # ------------------------------------------------------------------ commit

    def commit(self, launched: Launched) -> list[StepOutput]:
        """Commit the tokens of a launched step: make text, decide which requests end, and return the outputs.

        An error in one request fails that request alone.
        """
        outputs: list[StepOutput] = []
        for done in launched.sampled:
            if not done.requests:
                continue
            # One copy from device to host for all rows; log-probabilities, if a request asks for them, take more.
            token_ids = done.sampled.token_ids.tolist()
            outputs += self.commit_rows(done.requests, token_ids, read_logprobs(done.sampled, done.requests))
        outputs += [fail(request, error) for request, error in launched.failed if not request.is_terminal]
        self.register_prefixes(launched.plan)  # after tokens are read: reading keys earlier would block
        return outputs

    def commit_rows(
        self,
        requests: Sequence[Request],
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
    ) -> list[StepOutput]:
        """Commit the tokens of a pass's rows. Returns the outputs.

        A request's rows are adjacent. The rows after a wrong guess, or after the request's end, are dropped.
        """
        outputs: list[StepOutput] = []
        wrong: Request | None = None  # a request whose further rows follow a wrong guess
        for request, token_id, row_logprobs in zip(requests, token_ids, logprobs, strict=True):
            if request.is_terminal or request is wrong:
                continue
            if request.drafts.token_ids and not self.verify(request, token_id):
                wrong = request
            try:
                outputs.append(commit_token(request, token_id, row_logprobs))
            except (GrammarFailedError, NoTokenLeftError) as error:  # the request's own fields are the cause
                logger.warning("request %s failed: %s", request.request_id, error)
                outputs.append(fail(request, error))
            except Exception as error:
                logger.exception("request %s failed", request.request_id)
                outputs.append(fail(request, error))
        return outputs

    def verify(self, request: Request, token_id: int) -> bool:
        """Remove the request's next guess, and return whether a sampled token equals it. If so, the column that the
        pass has computed for this guess counts as part of the sequence from now on."""
        right = request.drafts.verify(token_id)
        if right:
            slot = self.slot(request)
            length = self.pool.get_seq_len(slot) + 1
            self.pool.advance([Span(slot, 0, length, length)])
            request.prefill_progress = length
            self.telemetry.count_accepted(request.drafts.run)
        return right

    def register_prefixes(self, plan: StepPlan) -> None:
        """Let later requests share the prefixes that the plan's chunks have completed (from phase 8 on)."""
        for chunk in plan.prefill:
            self._aside(functools.partial(self.pool.register_prefix, chunk.request, chunk.end))


def raise_if_fatal(error: Exception) -> None:
    """Raise EngineDeadError if `error` is an error of the device. Out of memory does not count: the device stays
    usable."""
    if isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError):
        raise EngineDeadError(DEVICE_FAILED) from error
