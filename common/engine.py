"""The engine: one synchronous step, the same for every phase.

```text
retire ─> release ─> make_room ─> admit ─> plan ─> execute ─> outputs
                      │      ^
                      v      │  once for each preempted request
                     release ┘

scheduler   retire, make_room, admit, plan     integers: which request holds which blocks
runner      release, execute                   tensors
```

An engine does no I/O, starts no thread and does not use asyncio. The thread that owns it calls `step`.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from common.allowed_tokens import AllowedTokens
from common.commit import fail, terminal_output
from common.config import EngineConfig
from common.errors import EngineDeadError, InvalidPromptError, InvalidRequestError, RequestTimeoutError
from common.grammar import GrammarCompiler, Matcher
from common.request import Request, RequestState, SamplingParams, StepOutput
from common.runner import Runner
from common.scheduling import Clock, Scheduler, StepPlan
from common.telemetry import StepRecord, Telemetry
from common.text import IncrementalDetokenizer, Tokenizer

logger = logging.getLogger(__name__)

#: Called after each step, in the engine's thread, with the step's record, plan and outputs. A watcher that raises
#: is removed, and its error logged.
StepWatcher = Callable[[StepRecord, StepPlan, Sequence[StepOutput]], None]


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase's number, names and idea, for messages and pages."""

    number: int
    slug: str  # the package's name
    title: str
    idea: str  # one line

    @property
    def default_port(self) -> int:
        return 8000 + self.number


class Engine:
    """Takes requests and returns the outputs of each step. Not thread-safe: one thread owns it.

    Attributes:
        dead: the error that ended this engine; None while it runs.
        default_params: sampling parameters of requests that name none, by the model's `generation_config.json`.
        max_seq_len: the most tokens of one request, prompt and new ones.
        paused: True from `pause` to `resume`: steps plan nothing.
        watchers: functions that are called after each step; usually none.
        arrival_watchers: functions that are called with each request that is added; usually none.
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
        assert config.max_seq_len is not None, "an engine's config has its max_seq_len resolved"
        self.phase = phase
        self.config = config
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.grammars = GrammarCompiler(tokenizer, runner.model.config.eos_token_ids)
        self.telemetry = telemetry
        self.default_params = default_params or SamplingParams()
        self.clock = clock
        self.max_seq_len = config.max_seq_len
        self.dead: EngineDeadError | None = None
        self.paused = False
        self.watchers: list[StepWatcher] = []
        self.arrival_watchers: list[Callable[[Request], None]] = []
        self._requests: dict[str, Request] = {}  # by id: requests without a terminal output
        # A heap: each request's deadline on the engine's clock, and its order of arrival.
        self._deadlines: list[tuple[float, int, Request]] = []
        self._undelivered: list[StepOutput] = []  # outputs that the next completed step returns
        self._interrupted = False  # True while a step runs, and after a step that raised
        self._begun: StepRecord | None = None  # the record of the step that `wait` began
        self._arrivals = itertools.count()
        self._ids = itertools.count()

    # ------------------------------------------------------------------ requests

    def create_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        cache_salt: str = "",
        group: str = "",
        arrived_s: float | None = None,
        matcher: Matcher | None = None,
        prediction: Sequence[int] = (),
        priority: int = 0,
    ) -> Request:
        """Create a request after checking its prompt against this engine's limits. Any thread may call this.

        Args:
            prompt: text (the tokenizer adds its special tokens), or token ids (nothing is added).
            params: how to sample and when to end.
            request_id: unique among the live requests; generated if None.
            cache_salt: only requests with the same salt share cached prefixes.
            group: requests of one group, such as the choices of one answer, get one fair share of the seats.
            arrived_s: when the request reached the server, on the engine's clock. `request_timeout` counts from
                then.
            matcher: the matcher of `params.grammar`, if it was made before.
            prediction: tokens that the answer is expected to have; they change its speed, never its tokens.
            priority: requests with a lower one go first.

        Raises:
            InvalidPromptError: the prompt is empty, or has token ids outside the vocabulary.
            InvalidRequestError: prompt and `max_new_tokens` are too long, a parameter names an unknown token, no
                token may be sampled, or this phase has no priorities.
            InvalidGrammarError: `params.grammar` cannot be used.
        """
        new_tokens = params.max_new_tokens
        token_ids = self.tokenize(prompt, new_tokens) if isinstance(prompt, str) else list(prompt)
        if not token_ids:
            raise InvalidPromptError("the prompt is empty; send at least one token", param="prompt")
        self._check_length(len(token_ids), new_tokens)  # first: later checks are slow on two megabytes of ids
        vocab_size = self.runner.model.config.vocab_size
        outside = next((i for i in token_ids if not 0 <= i < vocab_size), None)
        if outside is not None:
            raise InvalidPromptError(
                f"token id {outside} is not in the vocabulary of {vocab_size}", param="prompt"
            )
        named: dict[str, Sequence[int]] = {
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": [i for i, _ in params.logit_bias],
            "allowed_token_ids": params.allowed_token_ids or (),
        }
        for param, ids in named.items():
            beyond = next((i for i in ids if not 0 <= i < vocab_size), None)
            if beyond is not None:
                raise InvalidRequestError(
                    f"{param}: token id {beyond} is not in the vocabulary of {vocab_size}", param=param
                )
        if priority and not self.scheduler.has_priorities:
            raise InvalidRequestError(
                f"priority: {self.phase.slug} serves requests as they arrive; send 0, or leave it out",
                param="priority",
            )
        allowed = AllowedTokens.of(self.tokenizer, params.allowed_token_ids, params.bad_words)
        if allowed is not None and allowed.is_empty:
            raise InvalidRequestError("bad_words: they forbid every allowed token", param="bad_words")
        if matcher is None and params.grammar is not None:
            matcher = self.grammars.new_matcher(params.grammar)
        return Request(
            request_id=request_id if request_id is not None else f"request-{next(self._ids)}",
            prompt_token_ids=token_ids,
            params=params,
            eos_token_ids=self.runner.model.config.eos_token_ids,
            detokenizer=IncrementalDetokenizer(
                self.tokenizer,
                token_ids,
                params.stop,
                params.min_tokens,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
            ),
            cache_salt=cache_salt,
            matcher=matcher,
            allowed=allowed,
            priority=priority,
            group=group,
            arrived_s=arrived_s,
            # Ids beyond the model's vocabulary cannot be computed, and no answer has them.
            prediction=tuple(itertools.takewhile(lambda token_id: token_id < vocab_size, prediction)),
        )

    def tokenize(self, text: str, new_tokens: int = 1, *, add_special_tokens: bool = True) -> list[int]:
        """Return a prompt's token ids. Any thread may call this.

        Raises:
            InvalidRequestError: the text is so long that prompt and `new_tokens` exceed the limit in any case.
                Nothing was tokenized.
        """
        self._check_length(self.tokenizer.min_tokens(text), new_tokens, exact=False)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens) if text else []

    @property
    def max_request_tokens(self) -> int:
        """The most tokens of one request, prompt and new ones, that `max_seq_len` and the KV memory allow."""
        pool_limit = self.runner.pool.max_request_tokens()
        return self.max_seq_len if pool_limit is None else min(self.max_seq_len, pool_limit)

    def _check_length(self, prompt_tokens: int, new_tokens: int, *, exact: bool = True) -> None:
        """Raise InvalidRequestError if a request is too long. `exact`: False if the prompt has `prompt_tokens` or
        more."""
        limit = self.max_request_tokens
        at_least = "" if exact else "at least "
        if prompt_tokens >= limit:
            raise InvalidRequestError(
                f"the prompt has {at_least}{prompt_tokens} tokens; at most {limit - 1} leave room for an answer "
                f"within this server's {limit}",
                param="prompt",
            )
        if new_tokens >= limit:
            raise InvalidRequestError(
                f"max_tokens {new_tokens} leaves no room for a prompt; this server holds {limit} a request",
                param="max_tokens",
            )
        if prompt_tokens + new_tokens > limit:
            raise InvalidRequestError(
                f"a prompt of {at_least}{prompt_tokens} tokens and max_tokens {new_tokens} make "
                f"{at_least}{prompt_tokens + new_tokens}; this server holds {limit} a request",
                param="max_tokens",
            )

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
            request.seed_generator(draw.getrandbits(63))
        if request.arrived_s is None:
            request.arrived_s = self.clock()
        if self.config.request_timeout is not None:
            deadline_s = request.arrived_s + self.config.request_timeout
            heapq.heappush(self._deadlines, (deadline_s, request.arrival, request))
        self.telemetry.counters.requests_added += 1
        for watch in self.arrival_watchers:
            watch(request)
        return True

    def cancel(self, request_id: str) -> None:
        """Cancel a request. Does nothing if it is done or unknown.

        The next step returns its terminal output. Its memory is freed when the scheduler retires it.
        """
        request = self._requests.get(request_id)
        if request is not None and not request.is_terminal:
            request.cancel()
            self._undelivered.append(terminal_output(request))

    def abort_all(self, error: Exception) -> list[StepOutput]:
        """Abandon the steps in flight and fail every live request. Returns all outputs that were not delivered.

        The next step, if there is one, frees the requests' memory. A request that finished in a step that raised
        keeps its finish reason; its last token is lost.
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
        """Fail requests: queue a terminal output for each request that has none."""
        ended = {output.request_id for output in self._undelivered if output.finished}
        for request in requests:
            if request.request_id not in ended:
                output = terminal_output(request) if request.is_terminal else fail(request, error)
                self._undelivered.append(output)

    def _restore(self) -> None:
        """Abandon the steps in flight and free all KV memory, shared prefixes included. Called after a step raised.

        That step's bookkeeping may be half done. If this method is interrupted, it may be called again.
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
        """The requests that have no terminal output yet, in the order they were added."""
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
        """Whether the next step returns outputs even if it computes nothing."""
        return bool(self._undelivered) or self._interrupted

    def next_wake(self) -> float | None:
        """Return when to call `step` again, on the engine's clock. None: not before a request is added or `resume`
        is called."""
        if self.dead is not None:
            return None
        now = self.clock()
        if self._owes_outputs or self.runner.in_flight:
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
        """Begin a step: block until the tokens that it reads first have been computed (phase 9).

        `step` would block as well. Requests that are added between `wait` and `step` are still part of its plan.
        """
        if self._begun is None:
            self._begun = self.telemetry.begin_step(self.clock())
            self.runner.wait()

    def step(self) -> list[StepOutput]:
        """Run one step. Returns its outputs. Each request gets exactly one terminal output.

        Raises:
            EngineDeadError: this engine ended in an earlier step.
            BaseException: an interrupt (Ctrl-C), or a bug in this code. The next step fails the requests that were
                being computed, and computes the waiting ones.
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
            if plan.decode or plan.prefill or not settled:  # else return them now
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

    def _plan(self, record: StepRecord) -> StepPlan:
        """Free the memory of ended requests, admit waiting ones, and plan the step. If paused, only free memory."""
        scheduler, runner = self.scheduler, self.runner
        pool, counters = runner.pool, self.telemetry.counters
        runner.release(scheduler.retire())
        plan = StepPlan()
        if not self.paused:
            while preempted := scheduler.make_room(pool):
                runner.release(preempted)
            scheduler.admit(pool)
            plan = scheduler.plan()
        counters.preemptions, counters.evictions = scheduler.preemptions, pool.evictions
        counters.failed_drafters = scheduler.failed_drafters
        record.waiting, record.active = scheduler.num_waiting, len(scheduler.active)
        record.decode_tokens = sum(1 for request in plan.decode if not request.is_terminal)
        record.prefill_tokens = sum(chunk.end - chunk.start for chunk in plan.prefill)
        record.kv_reserved_tokens = pool.reserved_tokens
        guessed = [len(request.drafts) for request in plan.decode if request.drafts]
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
