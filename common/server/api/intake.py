"""Intake: from the bytes of a request's body to requests in the engine's queue.

```text
body ──> validated ──> grammar compiled ──> places in the queue ──> tokenized ──> submitted ─ … ─> answer encoded
         if large:     unless quick:        --max-waiting-         2 threads                      large ones:
         1 thread,     1 thread,            requests                                              1 thread
         32 requests   8 requests
         400, 422,     422, 503             503                    400, 422
         413, 503

/tokenize, /detokenize ──> 1 thread, 16 requests
```

Every kind of work that a request causes outside of the engine's steps is bounded (`Admission`). Each kind has a
*lane*: a few threads of its own and, unless the requests are bounded elsewhere, a bound on those that wait. Slow
work of one kind delays requests of that kind only. A request that finds its lane full is refused at once (503
with the name of the lane and `Retry-After`). If a client leaves while its request waits in a lane, the request is
dropped.

Requests for text hold places in the engine's queue (`EngineWorker.hold_places`) while they are tokenized. They hold
none while their body is validated or a slow grammar compiled: a place is for a request that will soon be computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from common.constrained.grammar import Grammar, Matcher
from common.engine.requests import EngineFront
from common.errors import InvalidGrammarError, InvalidRequestError, RequestTimeoutError
from common.hosting.async_engine import EngineWorker, RequestStream
from common.request import Request as EngineRequest
from common.request import SamplingParams
from common.server.api.bodies import REFERENCES, BodyT, Limits, parse, refuse_too_many_values
from common.server.api.chat import ConversationRequest
from common.server.api.tokens import DetokenizeRequest, TokenizeRequest
from common.server.api.wanted import GenerationRequest
from common.server.errors import OVERLOADED, unavailable
from common.text.chat_template import BREAK
from common.text.dialect import Dialect

#: If the matchers for all choices of a request are expected to take at most this many seconds of processor time,
#: they are compiled in the thread that tokenizes the prompt.
QUICK_COMPILE_S = 0.05

#: Most prompt log-probabilities in one answer: tokens of the prompt × (top + 1) × choices. Each takes about 70
#: bytes of JSON.
MAX_PROMPT_LOGPROBS = 2**17

#: A text for `/tokenize`, or to be cut by `truncate_prompt_tokens`, is refused if it surely has more than this many
#: times the tokens of the longest request.
MAX_LENGTHS = 8

#: A predicted text (OpenAI's `prediction`) is cut to this many characters for each token that a request can have,
#: before it is tokenized.
CHARACTERS_A_TOKEN = 8

T = TypeVar("T")

#: Niceness of threads that no running stream waits for. On a core that the engine uses, too, they get a tenth of
#: the time. They get all of an idle core.
NICENESS = 10


class Intake:
    """Validates bodies, compiles grammars, tokenizes prompts and submits requests to an engine."""

    def __init__(
        self,
        engine: EngineFront,
        worker: EngineWorker,
        admission: Admission,
        limits: Limits,
        dialect: Dialect,
    ) -> None:
        self._engine = engine
        self._worker = worker
        self._admission = admission
        self._limits = limits
        self._dialect = dialect

    async def parse(
        self, body: bytes, form: type[BodyT], prepare: Callable[[BodyT], None] | None = None
    ) -> BodyT:
        """Validate a request's body, and return it as a `form`. `prepare` is called with it before it is checked.

        A large body is validated in a thread, so that the event loop goes on. So is one that refers to stored
        items, which may be many.

        Raises:
            ApiError: as `bodies.parse`; 413, it has too many values; 503, too many large bodies wait.
        """
        refers = prepare is not None and any(word in body for word in REFERENCES)
        containers = body.count(b"{") + body.count(b"[")
        is_small = len(body) <= self._admission.LARGE_BODY_BYTES
        if is_small and containers <= self._admission.MANY_CONTAINERS and not refers:
            return parse(body, form, self._limits, prepare)

        def validate() -> BodyT:
            refuse_too_many_values(body)
            return parse(body, form, self._limits, prepare)

        return await self._admission.validating.run(validate)

    async def submit(
        self, wanted: GenerationRequest, answer_id: str, arrived_s: float
    ) -> list[RequestStream]:
        """Submit all choices of a request to the engine, or none. Returns their streams of outputs, in order.

        If the caller is cancelled, work that has not begun is dropped and places in the queue are given back.

        Args:
            wanted: the request.
            answer_id: prefix of the ids of the engine's requests.
            arrived_s: time by which the whole request had come, on `time.monotonic`'s clock.

        Raises:
            QueueFullError: the queue has too few free places. Nothing was tokenized.
            ApiError: 503, too many grammars wait to be compiled. Nothing was tokenized.
            ShuttingDownError, EngineDeadError: no requests are accepted any more.
            InvalidRequestError: the engine can never serve the request.
            RequestTimeoutError: the time that a request may take was over before it was submitted.
        """
        timeout_s = self._engine.config.request_timeout
        left_s = None if timeout_s is None else arrived_s + timeout_s - time.monotonic()
        try:
            async with asyncio.timeout(left_s):
                return await self._submit(wanted, answer_id, arrived_s)
        except TimeoutError:
            assert timeout_s is not None, "nothing else here has a timeout"
            raise RequestTimeoutError.after(timeout_s) from None

    async def _submit(
        self, wanted: GenerationRequest, answer_id: str, arrived_s: float
    ) -> list[RequestStream]:
        choices = wanted.num_prompts * wanted.choices_per_prompt
        field = "tools"
        try:
            field, grammar = await self._grammar(wanted) or ("", None)
            matchers = await self._compile(grammar, choices)
            with self._worker.hold_places(choices) as places:
                requests = await self._admission.tokenizing.run(
                    functools.partial(self._make_requests, wanted, answer_id, arrived_s, grammar, matchers)
                )
                return places.submit(requests)
        except InvalidGrammarError as error:
            if error.param is not None:  # named already
                raise
            raise InvalidGrammarError(f"{field}: {error}", param=field) from None

    async def _grammar(self, wanted: GenerationRequest) -> tuple[str, Grammar] | None:
        """Return the path of the field that restricts an answer, and its grammar: see `usable_grammar`.

        If calls follow schemas, the grammar is tried here unless it is known, in the lane `compiling`.
        """
        grammars, use = self._engine.grammars, wanted.tool_use
        if use is None or not use.followed:
            return wanted.grammar_in(self._dialect)
        with contextlib.suppress(InvalidGrammarError):
            named = wanted.grammar_in(self._dialect)
            if named is None or grammars.accepts(named[1]):
                return named
        self._worker.check_room(wanted.choices_per_prompt)
        return await self._admission.compiling.run(
            functools.partial(wanted.usable_grammar, self._dialect, grammars.check)
        )

    async def _compile(self, grammar: Grammar | None, choices: int) -> Sequence[Matcher | None]:
        """Return a matcher for each choice; None for each if there is no grammar, or it is known to compile fast.

        A grammar that compiles quickly is compiled later, in the thread that tokenizes the prompt. Another grammar
        is compiled here, in the lane `compiling`, while the request holds no place in the queue.
        """
        if grammar is None:
            return [None] * choices
        compile_s = self._engine.grammars.compile_s(grammar)
        if compile_s is not None and compile_s * choices <= QUICK_COMPILE_S:
            return [None] * choices
        self._worker.check_room(choices)  # nothing is compiled for a request that the queue would refuse

        def compile_all() -> Sequence[Matcher | None]:
            return [self._engine.new_matcher(grammar) for _ in range(choices)]

        return await self._admission.compiling.run(compile_all)

    async def tokenize(self, wanted: TokenizeRequest) -> tuple[list[int], list[str] | None]:
        """Return the token ids of the text or conversation in a body of `/tokenize`, and each token's spelling.

        The spellings, as in the vocabulary, are None unless the body asks for them.

        Raises:
            ApiError: 503, the lane `converting` is full.
            InvalidRequestError: the model has no chat template, or its template refuses the conversation, or the
                text is too long (`MAX_LENGTHS`).
        """
        tokenizer = self._engine.tokenizer

        def convert() -> tuple[list[int], list[str] | None]:
            text = wanted.text(self._dialect)
            self._check_least_length(text, "at most {limit} are tokenized in one request")
            tokens = tokenizer.encode(text, add_special_tokens=wanted.adds_special_tokens)
            return tokens, [tokenizer.spelled(i) for i in tokens] if wanted.return_token_strs else None

        return await self._admission.converting.run(convert)

    async def count(self, wanted: ConversationRequest) -> int:
        """Return the number of tokens of the prompt that a conversation becomes.

        Raises:
            ApiError, InvalidRequestError: as `tokenize`.
        """

        def convert() -> int:
            (text,) = wanted.prompts(self._dialect)
            self._check_least_length(text, "at most {limit} are tokenized in one request")
            tokenizer = self._engine.tokenizer
            return len(tokenizer.encode(text, add_special_tokens=wanted.adds_special_tokens))

        return await self._admission.converting.run(convert)

    async def detokenize(self, wanted: DetokenizeRequest) -> str:
        """Return the text of the token ids in a body of `/detokenize`, special tokens included.

        Raises:
            ApiError: 503, the lane `converting` is full.
        """
        decode = functools.partial(self._engine.tokenizer.decode, wanted.tokens, skip_special_tokens=False)
        return await self._admission.converting.run(decode)

    async def render(self, wanted: ConversationRequest) -> str:
        """Return the prompt that a conversation becomes.

        Raises:
            ApiError: 503, the lane `converting` is full.
            InvalidRequestError: as `ConversationRequest.render`.
        """
        (text,) = await self._admission.converting.run(functools.partial(wanted.prompts, self._dialect))
        return text.replace(BREAK, "")

    # ------------------------------------------------------------------ in a thread

    def _make_requests(
        self,
        wanted: GenerationRequest,
        answer_id: str,
        arrived_s: float,
        grammar: Grammar | None,
        matchers: Sequence[Matcher | None],
    ) -> list[EngineRequest]:
        requests: list[EngineRequest] = []
        defaults = self._defaults(wanted, grammar)
        prediction = self._tokenize_prediction(wanted.predicted_text)
        scored = 0  # prompt tokens of all choices so far
        try:
            for prompt in wanted.prompts(self._dialect):
                token_ids = self._tokenize(prompt, wanted)
                scored += len(token_ids) * wanted.choices_per_prompt
                _check_prompt_logprobs(wanted, scored)
                max_new_tokens = self._max_new_tokens(wanted, len(token_ids))
                requests += [
                    self._engine.create_request(
                        token_ids,
                        wanted.sampling_params(choice, max_new_tokens, defaults),
                        f"{answer_id}-{len(requests) + choice}",
                        cache_salt=wanted.cache_salt or "",
                        group=answer_id,
                        arrived_s=arrived_s,
                        matcher=matchers[len(requests) + choice],
                        prediction=prediction,
                        priority=wanted.priority or 0,
                    )
                    for choice in range(wanted.choices_per_prompt)
                ]
        except InvalidRequestError as error:
            error.param = error.param and wanted.field_of(error.param)
            raise
        return requests

    def _defaults(self, wanted: GenerationRequest, grammar: Grammar | None) -> SamplingParams:
        """Return sampling parameters with the defaults of fields that a request may leave out, and its grammar.

        If the answer is searched for markers of thoughts or calls, and some markers are special tokens, special
        tokens stay in the text.
        """
        reads_markers = wanted.tool_use is not None or (wanted.has_parts and self._dialect.thinks)
        markers = self._engine.tokenizer.special_ids.intersection(self._dialect.special.values())
        return dataclasses.replace(
            self._engine.default_params,
            grammar=grammar,
            skip_special_tokens=not (reads_markers and markers),
        )

    def _tokenize_prediction(self, text: str) -> Sequence[int]:
        """Return the token ids of a predicted text, at most as many as the longest request may have."""
        if not text:
            return ()
        most = self._engine.max_request_tokens
        beginning = text[: CHARACTERS_A_TOKEN * most]
        return self._engine.tokenizer.encode(beginning, add_special_tokens=False)[:most]

    def _tokenize(self, prompt: str | Sequence[int], wanted: GenerationRequest) -> Sequence[int]:
        if not isinstance(prompt, str):
            return wanted.truncated(prompt, self._engine.max_request_tokens)
        if wanted.kept_prompt_tokens is not None:
            self._check_least_length(prompt, "at most {limit} are cut")
            tokenizer = self._engine.tokenizer
            token_ids = tokenizer.encode(prompt, add_special_tokens=wanted.adds_special_tokens)
            return wanted.truncated(token_ids, self._engine.max_request_tokens)
        at_least = 1 if wanted.cuts_max_tokens else wanted.max_new_tokens or 1
        return self._engine.tokenize(prompt, at_least, add_special_tokens=wanted.adds_special_tokens)

    def _check_least_length(self, text: str, rule: str) -> None:
        """Raise InvalidRequestError if a text surely has over `MAX_LENGTHS` times the longest request's tokens.

        This bounds the tokenizer's work. `Engine.create_request` checks later whether a prompt fits. `rule` goes
        into the message, with `{limit}` for the limit in tokens.
        """
        at_least = self._engine.tokenizer.min_tokens(text)
        limit = MAX_LENGTHS * self._engine.max_request_tokens
        if at_least > limit:
            raise InvalidRequestError(
                f"the text has at least {at_least} tokens; {rule.format(limit=limit)}", param="prompt"
            )

    def _max_new_tokens(self, wanted: GenerationRequest, prompt_tokens: int) -> int:
        """Return the most new tokens of a choice: the requested number, which some bodies cut to those that fit
        behind the prompt.

        If none is requested: the default, at most as many as fit (without a default, as many as fit), and at least
        `min_tokens`.

        Raises:
            InvalidRequestError: some new tokens fit, but fewer than `min_tokens`.
        """
        if wanted.max_new_tokens is not None and not wanted.cuts_max_tokens:
            return wanted.max_new_tokens
        room = self._engine.max_request_tokens - prompt_tokens
        if 0 < room < (wanted.min_tokens or 0):
            raise InvalidRequestError(
                f"min_tokens: {wanted.min_tokens} do not fit behind a prompt of {prompt_tokens} tokens",
                param="min_tokens",
            )
        # If no token fits, `create_request` refuses the prompt for its length. Parameters must be valid until then.
        most = wanted.max_new_tokens or wanted.default_new_tokens or room
        return max(min(room, most), wanted.min_tokens or 1)


def _check_prompt_logprobs(wanted: GenerationRequest, tokens: int) -> None:
    """Raise InvalidRequestError if an answer would show too many log-probabilities of prompt tokens.

    The bound is `MAX_PROMPT_LOGPROBS`. `tokens`: the number of prompt tokens, counted once for each choice.
    """
    top = wanted.scored_prompt
    if top is None:
        return
    entries = tokens * (top + 1)
    if entries > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"the answer would hold {entries} or more log-probabilities of prompt tokens "
            f"(tokens × (top + 1) × choices); at most {MAX_PROMPT_LOGPROBS} are computed. "
            "Send fewer prompts, a lower n or fewer top ones",
            param="prompt_logprobs",
        )


class Admission:
    """Bounds the work that requests cause outside of the engine's steps.

    Each kind of work has a lane (`Lane`): a few threads and, unless the work is bounded elsewhere, a bound on the
    requests that wait for them.

    Attributes:
        validating: bodies over `LARGE_BODY_BYTES`, or with more than `MANY_CONTAINERS` lists and objects; others
            are validated on the event loop.
        compiling: grammars that are not known to compile quickly.
        tokenizing: prompts. The places in the engine's queue bound their number.
        converting: texts and token ids of `/tokenize` and `/detokenize`.
        encoding: answers too large for the event loop. The connections bound their number.
    """

    #: Validating a body of this size takes about a millisecond.
    LARGE_BODY_BYTES = 64 * 1024

    #: Validating a message takes about ten microseconds.
    MANY_CONTAINERS = 256

    def __init__(self) -> None:
        self.validating = Lane("validating", threads=1, limit=32)
        self.compiling = Lane("compiling", threads=1, limit=8, retry_after_s=2, niceness=NICENESS)
        # With one thread, a prompt of two megabytes would delay every short one for a second. With more than two,
        # such prompts would take the cores that the engine computes on.
        self.tokenizing = Lane("tokenizing", threads=2, limit=None)
        self.converting = Lane("converting", threads=1, limit=16, niceness=NICENESS)
        self.encoding = Lane("encoding", threads=1, limit=None)


class Lane:
    """Threads for one kind of work, and a bound on the requests whose work runs or waits there.

    Args:
        name: the work, as a participle such as `tokenizing`. The error of a full lane then has the code
            `tokenizing_busy`.
        threads: number of requests that are worked on at the same time.
        limit: most requests whose work may run or wait; None if their number is bounded elsewhere.
        retry_after_s: `Retry-After` of the error of a full lane, in seconds.
        niceness: niceness of its threads, as in `nice(1)`; on Linux only.

    Attributes:
        jobs: number of requests whose work runs or waits. Work that runs on after its client has left counts, too.
    """

    def __init__(
        self, name: str, *, threads: int, limit: int | None, retry_after_s: int = 1, niceness: int = 0
    ) -> None:
        self.name = name
        self._limit = limit
        self._retry_after_s = retry_after_s
        self._threads = ThreadPoolExecutor(
            threads, thread_name_prefix=name, initializer=_stand_back, initargs=(niceness,)
        )
        self._lock = threading.Lock()
        self.jobs = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in one of the lane's threads and return its result.

        If the caller is cancelled, work that has not begun is dropped; work that has begun goes on, since a thread
        cannot be interrupted.

        Raises:
            ApiError: 503, the lane is full.
        """
        with self._lock:
            if self._limit is not None and self.jobs >= self._limit:
                raise unavailable(
                    f"{self._limit} requests are {self.name} or wait for it, the most this server allows; "
                    "try again shortly",
                    code=f"{self.name}_busy",
                    retry_after_s=self._retry_after_s,
                    type=OVERLOADED,
                )
            self.jobs += 1
        job = self._threads.submit(work)
        job.add_done_callback(self._end_job)
        return await asyncio.wrap_future(job)

    def _end_job(self, _: Future[Any]) -> None:
        with self._lock:
            self.jobs -= 1


def _stand_back(niceness: int) -> None:
    """Add `niceness` to this thread's niceness, on Linux only: elsewhere this would slow the whole process."""
    if sys.platform == "linux" and niceness > 0:
        thread = threading.get_native_id()
        own = os.getpriority(os.PRIO_PROCESS, thread)  # of the server, which may run under `nice`
        os.setpriority(os.PRIO_PROCESS, thread, min(own + niceness, 19))
