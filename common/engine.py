"""The engine: one synchronous step, the same for every phase.

```text
retire ───> release ─> make_room ─> admit ─> plan ─> execute ─> outputs
scheduler   runner     └────── scheduler ───────┘   runner
└──────────── integers: who holds what ─────────┘   └ tensors
```

An engine does no I/O, starts no thread and knows nothing of asyncio; whoever owns it calls `step`.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from common.config import EngineConfig
from common.errors import EngineDeadError, InvalidPromptError, InvalidRequestError, RequestTimeoutError
from common.grammar import GrammarCompiler
from common.request import Request, SamplingParams, StepOutput
from common.runner import Runner, fail, terminal_output
from common.scheduling import Scheduler, StepPlan
from common.telemetry import StepRecord, Telemetry
from common.text import IncrementalDetokenizer, Tokenizer

Clock = Callable[[], float]

#: Told of each step once it is over: its record, what was planned, and what it gave clients. Called by the thread
#: that steps, which waits for it.
StepWatcher = Callable[[StepRecord, StepPlan, Sequence[StepOutput]], None]


@dataclass(frozen=True, slots=True)
class Phase:
    """What a phase says of itself."""

    number: int
    slug: str  # its package's name
    title: str
    idea: str  # one line

    @property
    def default_port(self) -> int:
        return 8000 + self.number


class Engine:
    """Requests in, step outputs out. Not thread-safe: one thread owns it.

    Attributes:
        dead: the error that ended this engine; None while it lives.
        max_seq_len: prompt and new tokens of one request at the most.
        watchers: who is told of each step; nobody, unless someone wants to see.
    """

    #: Methods that a step's time goes into beside its runner's, and what a trace calls them.
    PARTS: ClassVar[Mapping[str, str]] = {"_plan": "plan"}

    def __init__(
        self,
        *,
        phase: Phase,
        config: EngineConfig,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer,
        telemetry: Telemetry,
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
        self.clock = clock
        self.max_seq_len = config.max_seq_len
        self.dead: EngineDeadError | None = None
        self.paused = False
        self.watchers: list[StepWatcher] = []
        self._requests: dict[str, Request] = {}  # all that have not had their terminal output
        self._deadlines: deque[tuple[float, Request]] = (
            deque()
        )  # when each is given up, on the engine's clock
        self._notices: list[StepOutput] = []  # terminal outputs that the next step delivers
        self._has_begun = False  # whether the present step has been waited for
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
    ) -> Request:
        """Check a prompt against this engine's limits and make a request of it. Any thread may call this.

        Args:
            prompt: text (the tokenizer adds its special tokens), or token ids (nothing is added).
            params: how to sample and when to end.
            request_id: unique among the requests that live; made up if None.
            cache_salt: memory of equal prompts is shared, where it is, only by requests with the same one.

        Raises:
            InvalidPromptError: empty, or with ids that the model does not have.
            InvalidRequestError: too long together with its `max_new_tokens`.
            InvalidGrammarError: `params.grammar` is none that can be followed.
        """
        new_tokens = params.max_new_tokens
        token_ids = self.tokenize(prompt, new_tokens) if isinstance(prompt, str) else list(prompt)
        if not token_ids:
            raise InvalidPromptError("the prompt is empty; send at least one token", param="prompt")
        self._check_length(
            len(token_ids), new_tokens
        )  # first: what follows may be slow on two megabytes of ids
        vocab_size = self.runner.model.config.vocab_size
        outside = next((i for i in token_ids if not 0 <= i < vocab_size), None)
        if outside is not None:
            raise InvalidPromptError(
                f"token id {outside} is not in the vocabulary of {vocab_size}", param="prompt"
            )
        named = {"stop_token_ids": params.stop_token_ids, "logit_bias": [i for i, _ in params.logit_bias]}
        for param, ids in named.items():
            beyond = next((i for i in ids if not 0 <= i < vocab_size), None)
            if beyond is not None:
                raise InvalidRequestError(
                    f"{param}: token id {beyond} is not in the vocabulary of {vocab_size}", param=param
                )
        return Request(
            request_id=request_id if request_id is not None else f"request-{next(self._ids)}",
            prompt_token_ids=token_ids,
            params=params,
            eos_token_ids=self.runner.model.config.eos_token_ids,
            detokenizer=IncrementalDetokenizer(self.tokenizer, token_ids, params.stop),
            cache_salt=cache_salt,
            matcher=None if params.grammar is None else self.grammars.new_matcher(params.grammar),
        )

    def tokenize(self, text: str, new_tokens: int = 1, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt that leaves room for so many new ones, as far as that is known before. Any thread
        may call this.

        Raises:
            InvalidRequestError: its length alone says that it is too long; nothing was tokenized.
        """
        self._check_length(self.tokenizer.min_tokens(text), new_tokens, exact=False)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens) if text else []

    @property
    def max_request_tokens(self) -> int:
        """Prompt and new tokens of one request at the most, with the KV memory there is."""
        pool_limit = self.runner.pool.max_request_tokens()
        return self.max_seq_len if pool_limit is None else min(self.max_seq_len, pool_limit)

    def _check_length(self, prompt_tokens: int, new_tokens: int, *, exact: bool = True) -> None:
        """Refuse what is too long. `exact`: whether `prompt_tokens` is the prompt's length, or it may be longer."""
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
        """Queue a request. False: the queue is full, nothing has changed.

        Raises:
            EngineDeadError: this engine has ended.
            ValueError: a live request has the same id.
        """
        if self.dead is not None:
            raise self.dead
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id!r} is in use")
        if not self.scheduler.add_request(request):
            return False
        request.arrival = next(self._arrivals)
        if request.params.seed is None:
            # Reproducible for an engine seed and an order of arrival, and alike for no two requests.
            draw = random.Random(f"{self.config.seed}:{request.arrival}")
            request.seed_generator(draw.getrandbits(63))
        self._requests[request.request_id] = request
        if self.config.request_timeout is not None:
            self._deadlines.append((self.clock() + self.config.request_timeout, request))
        self.telemetry.counters.requests_added += 1
        return True

    def cancel(self, request_id: str) -> None:
        """End a request that nobody waits for any more; one that is done or unknown is left alone.

        Its terminal output comes with the next step, its memory returns at its scheduler's next retirement.
        """
        request = self._requests.get(request_id)
        if request is not None and not request.is_terminal:
            request.cancel()
            self._notices.append(terminal_output(request))

    def abort_all(self, error: Exception) -> list[StepOutput]:
        """Fail every live request: the terminal outputs. Their memory returns at the next step, if there is one.

        A request that had ended in a step that raised is told how it ended: its output was lost with the step.
        """
        self._notices.clear()  # cancelled requests: told below, like all that have ended
        outputs = [terminal_output(r) if r.is_terminal else fail(r, error) for r in self._requests.values()]
        self._settle(outputs)
        return outputs

    @property
    def live_requests(self) -> Iterable[Request]:
        """Requests that were added and have not had their terminal output, in that order."""
        return self._requests.values()

    def reset_prefix_cache(self) -> int:
        """Forget what is cached and used by nobody, nor by those who are done; how many blocks that were."""
        self.runner.release(self.scheduler.retire())
        return self.runner.pool.reset_prefix_cache()

    # ------------------------------------------------------------------ stepping

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.runner.in_flight or bool(self._notices)

    def next_wake(self) -> float | None:
        """When to call `step` again, on the engine's clock; None: not before something is added."""
        if self.dead is not None or self.paused:
            return None
        now = self.clock()
        return now if self._notices or self.runner.in_flight else self.scheduler.next_wake(now)

    @property
    def is_due(self) -> bool:
        """Whether `step` is to be called now."""
        wake = self.next_wake()
        return wake is not None and wake <= self.clock()

    def wait(self) -> None:
        """Begin a step: wait for what it will read of steps before it.

        `step` does that itself, but whoever is added between the two is still part of its plan.
        """
        if not self._has_begun:
            self._has_begun = True
            self.telemetry.begin_step(self.clock())
            self.runner.wait()

    def step(self) -> list[StepOutput]:
        """Retire, admit, compute: the outputs of this step, at most one terminal output per request ever.

        Raises:
            EngineDeadError: this engine has ended, in an earlier step.
        """
        if self.dead is not None:
            raise self.dead
        scheduler, runner, telemetry = self.scheduler, self.runner, self.telemetry
        pool = runner.pool
        record = telemetry.current if self._has_begun else telemetry.begin_step(self.clock())
        self._has_begun = False
        failed_passes = telemetry.counters.failed_passes
        plan = StepPlan()

        try:
            self._give_up_late()
            outputs = self._notices + runner.settle()
            plan = self._plan(record)
            outputs += runner.execute(plan)
            self._notices = []
        except EngineDeadError as error:
            self.dead = error
            outputs = self.abort_all(error)
        if telemetry.counters.failed_passes > failed_passes:
            telemetry.counters.reclaimed_slots += pool.audit(scheduler.active)
        record.kv_used_tokens = pool.used_tokens
        telemetry.end_step(self.clock())
        self._settle(outputs)
        for watch in self.watchers:
            watch(record, plan, outputs)
        return outputs

    def _give_up_late(self) -> None:
        """Fail those whose time is over. All have as much of it, so they are due in the order they came."""
        now = self.clock()
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][1].is_terminal):
            _, request = self._deadlines.popleft()
            if not request.is_terminal:
                timeout_s = self.config.request_timeout
                error = RequestTimeoutError(
                    f"not done within {timeout_s:g} s, the most this server gives a request"
                )
                self._notices.append(fail(request, error))

    def _plan(self, record: StepRecord) -> StepPlan:
        """Who leaves, who comes, and what is computed."""
        scheduler, runner = self.scheduler, self.runner
        pool, counters = runner.pool, self.telemetry.counters
        runner.release(scheduler.retire())
        scheduler.make_room(pool)
        scheduler.admit(pool)
        plan = scheduler.plan()
        counters.preemptions, counters.evictions = scheduler.preemptions, pool.evictions
        record.waiting, record.active = scheduler.num_waiting, len(scheduler.active)
        record.decode_tokens = sum(1 for request in plan.decode if not request.is_terminal)
        record.prefill_tokens = sum(chunk.end - chunk.start for chunk in plan.prefill)
        record.kv_reserved_tokens = pool.reserved_tokens
        begun = [chunk.request for chunk in plan.prefill if chunk.is_first]
        record.prompt_tokens = sum(request.num_prompt_tokens for request in begun)
        record.cached_tokens = sum(request.cached_tokens for request in begun)
        return plan

    def pause(self, timeout_s: float) -> list[StepOutput]:
        """Finish what is in flight and compute nothing more until `resume`: outputs.

        Raises:
            TimeoutError: that took longer; nothing is paused, and the next steps bring it to its end.
        """
        outputs = self.runner.drain(timeout_s)
        self.paused = True
        self._has_begun = False  # the step that has been waited for does not come, or much later
        self._settle(outputs)
        return outputs

    def resume(self) -> None:
        self.paused = False

    def _settle(self, outputs: list[StepOutput]) -> None:
        """Forget the requests that these outputs end."""
        counters = self.telemetry.counters
        for output in outputs:
            if output.finished and self._requests.pop(output.request_id, None) is not None:
                if output.error is not None:
                    counters.requests_failed += 1
                elif output.finish_reason == "cancelled":
                    counters.requests_cancelled += 1
                else:
                    counters.requests_finished += 1
