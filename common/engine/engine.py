"""The engine: one synchronous step, the same for every phase.

```text
retire ─> release ─> make_room ─> admit ─> plan ─> execute ─> outputs
                      │      ^
                      v      │  once for each preempted request
                     release ┘

scheduler   retire, make_room, admit, plan     integers: which request holds which blocks
runner      release, execute                   tensors
```

An engine knows nothing of sockets and asyncio. The thread that owns it calls `step`.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence

from common.constrained.grammar import GrammarCompiler
from common.engine.commit import fail, terminal_output
from common.engine.config import EngineConfig
from common.engine.requests import EngineFacts, Phase, RequestMaker
from common.engine.runner import Runner
from common.engine.scheduling import Clock, Scheduler, StepPlan
from common.engine.telemetry import StepRecord, Telemetry
from common.errors import EngineDeadError, RequestTimeoutError
from common.request import FinishReason, Request, RequestState, SamplingParams, StepOutput
from common.text.tokenizer import Tokenizer
from kernels.dispatch import kernels_on

logger = logging.getLogger(__name__)

#: Called after each step, in the engine's thread, with the step's record, plan and outputs. A watcher that raises
#: is removed, and its error logged.
StepWatcher = Callable[[StepRecord, StepPlan, Sequence[StepOutput]], None]


class Engine:
    """Takes requests and returns the outputs of each step. Not thread-safe: one thread owns it.

    Attributes:
        maker: makes requests for this engine.
        dead: the error that ended the engine; None while it runs.
        paused: True from `pause` to `resume`. While it is True, steps compute nothing new.
        watchers: functions that are called after each step (see `StepWatcher`).
        plan_watchers: functions that are called with each step's plan before its passes run.
        arrival_watchers: functions that are called with each request after it was added.
    """

    def __init__(
        self,
        *,
        phase: Phase,
        config: EngineConfig,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer,
        telemetry: Telemetry,
        default_params: SamplingParams | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        model = runner.model
        facts = EngineFacts(
            phase=phase,
            config=config,
            default_params=default_params or SamplingParams(),
            vocab_size=model.config.vocab_size,
            eos_token_ids=model.config.eos_token_ids,
            tokenizer_files=tokenizer.files,
            dtype=str(model.dtype).removeprefix("torch."),
            weight_dtype=str(model.weight_dtype).removeprefix("torch."),
            device=str(model.device),
            kernels=kernels_on(model.device),
            batch_invariant=model.batch_invariant,
            has_priorities=scheduler.has_priorities,
            pool_limit=runner.pool.max_request_tokens(),
        )
        self.maker = RequestMaker(facts, tokenizer, GrammarCompiler(tokenizer, model.config.eos_token_ids))
        self.phase = phase
        self.config = config
        self.telemetry = telemetry
        self.clock = clock
        self.dead: EngineDeadError | None = None
        self.paused = False
        self.scheduler = scheduler
        self.runner = runner
        self.watchers: list[StepWatcher] = []
        self.plan_watchers: list[Callable[[StepPlan], None]] = []
        self.arrival_watchers: list[Callable[[Request], None]] = []
        self._requests: dict[str, Request] = {}  # by id: see `live_requests`
        # A heap: each request's deadline on the engine's clock, and its order of arrival.
        self._deadlines: list[tuple[float, int, Request]] = []
        self._undelivered: list[StepOutput] = []  # outputs that the next completed step returns
        self._interrupted = False  # True while a step runs, and after a step that raised
        self._begun: StepRecord | None = None  # the record of the step that `wait` began
        self._arrivals = itertools.count()

    # ------------------------------------------------------------------ requests

    def add_request(self, request: Request) -> bool:
        """Queue a request. Returns False, and changes nothing, if the queue is full.

        Raises:
            EngineDeadError: this engine has ended.
            ValueError: a live request has the same id.
        """
        if self.dead is not None:
            raise self.dead
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id!r} is in use")
        # Recorded before it is queued, so that an interrupt in between does not lose the request.
        self._requests[request.request_id] = request
        if not self.scheduler.add_request(request):
            del self._requests[request.request_id]
            return False
        request.arrival = next(self._arrivals)
        if request.params.seed is None:
            # Reproducible from the engine's seed and the order of arrival, and different for each request.
            draw = random.Random(f"{self.config.seed}:{request.arrival}")
            request.sampling.seed(draw.getrandbits(63))
        if request.arrived_s is None:
            request.arrived_s = self.clock()
        if self.config.request_timeout is not None:
            deadline_s = request.arrived_s + self.config.request_timeout
            heapq.heappush(self._deadlines, (deadline_s, request.arrival, request))
        self.telemetry.counters.requests_added += 1
        for watch in self.arrival_watchers:
            watch(request)
        return True

    def cancel(self, request_id: str, reason: FinishReason = "cancelled") -> None:
        """Cancel a request. Does nothing if the request has ended or is unknown.

        The next step returns the request's terminal output. Its memory is freed when the scheduler retires it.

        Args:
            request_id: the request's id.
            reason: the request's finish reason: `stop` if another process makes the text and has found a stop
                string.
        """
        request = self._requests.get(request_id)
        if request is not None and not request.is_terminal:
            request.cancel(reason)
            self._undelivered.append(terminal_output(request))

    def abort_all(self, error: Exception) -> list[StepOutput]:
        """Abandon the steps in flight and fail every live request. Returns all outputs that were not delivered.

        After a step that raised, the requests' memory is freed now, else by the next step. A request that finished
        in a step that raised keeps its finish reason; its last token is lost.
        """
        if self._interrupted:
            self._restore()
        else:
            self.runner.abandon()
        self._fail(self._requests.values(), error)
        self._interrupted = False
        outputs, self._undelivered = self._undelivered, []
        self._forget_ended(outputs)
        return outputs

    def _fail(self, requests: Iterable[Request], error: Exception) -> None:
        """Queue a terminal output, to be delivered next, for each request that has none. Fail the requests that
        have not ended."""
        ended = {output.request_id for output in self._undelivered if output.finished}
        for request in requests:
            if request.request_id not in ended:
                output = terminal_output(request) if request.is_terminal else fail(request, error)
                self._undelivered.append(output)

    def _restore(self) -> None:
        """Abandon the steps in flight and free all KV memory, shared prefixes included. Called after a step that
        raised, whose bookkeeping may be half done.

        If this method is interrupted, it may be called again.
        """
        self.runner.abandon()
        for request in (*self._requests.values(), *self.scheduler.active, *self.scheduler.waiting):
            request.slot = None
        self.runner.pool.clear()

    def _fail_interrupted(self) -> None:
        """Fail the requests that a step was computing when it raised: some of their tokens may be lost."""
        self._restore()
        waiting = RequestState.WAITING
        begun = [request for request in self._requests.values() if request.state is not waiting]
        self._fail(begun, RuntimeError("the step that computed this request was interrupted"))

    @property
    def live_requests(self) -> Iterable[Request]:
        """The requests whose terminal output was not returned yet, in the order in which they were added."""
        return self._requests.values()

    def reset_prefix_cache(self) -> int:
        """Free the cached blocks that no unfinished request uses. Returns their number."""
        self.runner.release(self.scheduler.retire())
        return self.runner.pool.reset_prefix_cache()

    # ------------------------------------------------------------------ stepping

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.runner.in_flight or self._owes_outputs

    @property
    def _owes_outputs(self) -> bool:
        """Whether the next step may return outputs even if it computes nothing."""
        return bool(self._undelivered) or self._interrupted

    def next_wake(self) -> float | None:
        """Return when to call `step` again, in seconds on the engine's clock. None: the engine is dead, or has no
        work before a request is added or cancelled, or `resume` is called. A step that `wait` began is due, even if
        a pause has left it nothing to compute: its record must say what the engine has now."""
        if self.dead is not None:
            return None
        now = self.clock()
        if self._owes_outputs or self.runner.in_flight or self._begun is not None:
            return now
        if self.paused:  # requests may still time out
            return self._deadlines[0][0] if self._deadlines else None
        return self.scheduler.next_wake(now)

    @property
    def is_due(self) -> bool:
        """Whether `step` should be called now."""
        wake = self.next_wake()
        return wake is not None and wake <= self.clock()

    def wait(self) -> None:
        """Begin a step. From phase 9 on, block until the tokens are computed that the step must commit before it
        plans, if there are any.

        `step` would block as well. But requests that are added between `wait` and `step` can be part of the plan.
        """
        if self._begun is None:
            self._begun = self.telemetry.begin_step(self.clock())
            self.runner.wait()

    def step(self) -> list[StepOutput]:
        """Run one step. Returns the outputs to deliver now. Each request gets exactly one terminal output.

        Raises:
            EngineDeadError: this engine has ended before.
            BaseException: an interrupt (Ctrl-C), or a bug in this code. The next step fails the requests that had
                a seat, and computes the waiting ones.
        """
        if self.dead is not None:
            raise self.dead
        telemetry, runner = self.telemetry, self.runner
        record = self._begun or telemetry.begin_step(self.clock())
        self._begun = None
        failed_passes = telemetry.counters.failed_passes
        plan = StepPlan()
        if self._interrupted:
            self._fail_interrupted()
        self._interrupted = True
        try:
            self._fail_overdue()
            settled = runner.settle()
            self._undelivered += settled
            with telemetry.part("plan"):
                plan = self._plan(record)
            for planned in self.plan_watchers:
                planned(plan)
            if plan.decode or plan.prefill or not settled:  # else return the settled outputs at once
                self._undelivered += runner.execute(plan)
        except EngineDeadError as error:
            self.dead = error
            runner.abandon()
            self._fail(self._requests.values(), error)
        self._interrupted = False
        if telemetry.counters.failed_passes > failed_passes:
            holders = [*self.scheduler.active, *self.scheduler.waiting]
            telemetry.counters.reclaimed_slots += runner.pool.audit(holders)
        record.kv_used_tokens = runner.pool.used_tokens
        telemetry.end_step(self.clock())
        outputs, self._undelivered = self._undelivered, []
        self._forget_ended(outputs)
        self._call_watchers(record, plan, outputs)
        return outputs

    def _call_watchers(self, record: StepRecord, plan: StepPlan, outputs: Sequence[StepOutput]) -> None:
        for watch in tuple(self.watchers):
            try:
                watch(record, plan, outputs)
            except Exception:  # the step's outputs must still reach their clients
                logger.exception("a watcher of the engine's steps failed, and is called no more")
                self.unwatch(watch)

    def unwatch(self, watcher: StepWatcher) -> None:
        """Remove a watcher, unless it was removed before because it raised."""
        if watcher in self.watchers:
            self.watchers.remove(watcher)

    def _fail_overdue(self) -> None:
        """Fail requests whose deadline has passed."""
        timeout_s = self.config.request_timeout
        if timeout_s is None:
            return
        now = self.clock()
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].is_terminal):
            _, _, request = heapq.heappop(self._deadlines)
            if not request.is_terminal:
                self._undelivered.append(fail(request, RequestTimeoutError.after(timeout_s)))
        if len(self._deadlines) > 2 * len(self._requests):  # most have ended, behind one that still runs
            self._deadlines = [each for each in self._deadlines if not each[2].is_terminal]
            heapq.heapify(self._deadlines)

    def _plan(self, record: StepRecord) -> StepPlan:
        """Free the memory of ended requests, preempt, admit waiting requests, and plan the step. If the engine is
        paused, only free memory."""
        scheduler, runner = self.scheduler, self.runner
        pool, counters = runner.pool, self.telemetry.counters
        runner.release(scheduler.retire())
        plan = StepPlan()
        if not self.paused:
            while preempted := scheduler.make_room(pool):
                runner.release(preempted)
            scheduler.admit(pool)
            plan = scheduler.plan()
        counters.preemptions, counters.failed_drafters = scheduler.preemptions, scheduler.failed_drafters
        for name, count in pool.counts().items():
            setattr(counters, name, count)
        record.waiting, record.active = scheduler.num_waiting, len(scheduler.active)
        record.decode_tokens = sum(1 for request in plan.decode if not request.is_terminal)
        record.prefill_tokens = sum(chunk.end - chunk.start for chunk in plan.prefill)
        record.kv_reserved_tokens = pool.reserved_tokens
        guessed = [len(ids) for request in plan.decode if (ids := request.drafts.token_ids)]
        record.drafts, record.draft_tokens = len(guessed), sum(guessed)
        begun = [chunk.request for chunk in plan.prefill if chunk.is_first]
        if begun:
            now = self.clock()
            for request in begun:
                request.scheduled_s = now
        record.prompt_tokens = sum(request.num_prompt_tokens for request in begun)
        record.cached_tokens = sum(request.cached_tokens for request in begun)
        return plan

    def pause(self) -> None:
        """Plan no steps until `resume`. The next steps deliver the tokens in flight (`runner.in_flight`)."""
        self.paused = True

    def resume(self) -> None:
        """Plan steps again. Requests that were added during the pause are in the queue."""
        self.paused = False

    def _forget_ended(self, outputs: list[StepOutput]) -> None:
        """Count the requests that these outputs end, and remove them from the live requests."""
        counters = self.telemetry.counters
        for output in outputs:
            if output.finished and self._requests.pop(output.request_id, None) is not None:
                if output.error is not None:
                    counters.requests_failed += 1
                elif output.finish_reason == "cancelled":
                    counters.requests_cancelled += 1
                else:
                    counters.requests_finished += 1
