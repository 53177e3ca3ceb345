"""Intake: from the bytes of a request's body to requests in the engine's queue.

```text
body ──> validated ──> grammar compiled ──> places in the queue ──> tokenized ──> submitted ─ … ─> answer encoded
         if large:     unless quick:        --max-waiting-         2 threads                      large ones:
         1 thread,     1 thread,            requests                                              1 thread
         32 requests   8 requests
         400, 422,     422, 503             503                    400, 422
         413, 503
```

The steps outside of the event loop each have a lane (`lanes`), which bounds their work. The routes that count or
convert tokens have one, too: 1 thread, 16 requests.

Requests for text hold places in the engine's queue (`AsyncEngine.hold_places`) while they are tokenized. They hold
none while their body is validated or a slow grammar compiled: a place is for a request that will soon be computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import Sequence

from starlette.requests import Request

from common.constrained.grammar import Grammar, Matcher
from common.engine.requests import Handling
from common.errors import InvalidGrammarError, InvalidRequestError, RequestTimeoutError
from common.hosting.async_engine import AsyncEngine, RequestStream
from common.request import Request as EngineRequest
from common.request import SamplingParams
from common.server.api.bodies import REFERENCES, BodyT, Limits, parse, refuse_too_many_values
from common.server.api.conversation import ConversationRequest
from common.server.api.lanes import Admission
from common.server.api.stream import while_connected
from common.server.api.wanted import GenerationRequest
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


class Intake:
    """Validates bodies, compiles grammars, tokenizes prompts and submits requests to an engine."""

    def __init__(self, engine: AsyncEngine, admission: Admission, limits: Limits, dialect: Dialect) -> None:
        self._engine = engine
        self._admission = admission
        self._limits = limits
        self._dialect = dialect

    async def parse(self, request: Request, body: bytes, form: type[BodyT]) -> BodyT:
        """Validate the body of a request, and return it as a `form`.

        A large body is validated in a thread, so that the event loop goes on. So is one that refers to stored
        items, which may be many.

        Raises:
            ApiError: as `bodies.parse`; 413, it has too many values; 503, too many large bodies wait.
            ClientDisconnect: the client left.
        """

        refers = any(word in body for word in REFERENCES)
        containers = body.count(b"{") + body.count(b"[")
        is_small = len(body) <= self._admission.LARGE_BODY_BYTES
        if is_small and containers <= self._admission.MANY_CONTAINERS and not refers:
            return parse(body, form, self._limits, request)

        def validate() -> BodyT:
            refuse_too_many_values(body)
            return parse(body, form, self._limits, request)

        return await while_connected(request.receive, self._admission.validating.run(validate))

    async def submit(
        self, wanted: GenerationRequest, answer_id: str, arrived_s: float
    ) -> list[RequestStream]:
        """Submit all choices of a request to the engine, or none. Returns their streams of outputs, in order.

        If the caller is cancelled, work that has not begun is dropped and places in the queue are given back.
        `arrived_s` is the time by which the whole request had come, on `time.monotonic`'s clock.

        Raises:
            QueueFullError: the queue has too few free places. Nothing was tokenized.
            ApiError: 503, too many grammars wait to be compiled. Nothing was tokenized.
            ShuttingDownError, EngineDeadError: no requests are accepted any more.
            InvalidRequestError: the engine can never serve the request.
            RequestTimeoutError: the time that a request may take was over before it was submitted.
        """
        timeout_s = self._engine.facts.config.request_timeout
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
            with self._engine.hold_places(choices):
                requests = await self._admission.tokenizing.run(
                    functools.partial(self._make_requests, wanted, answer_id, arrived_s, grammar, matchers)
                )
                return self._engine.submit(requests)
        except InvalidGrammarError as error:
            if error.param is not None:  # named already
                raise
            raise InvalidGrammarError(f"{field}: {error}", param=field) from None

    async def _grammar(self, wanted: GenerationRequest) -> tuple[str, Grammar] | None:
        """Return the path of the field that restricts an answer, and its grammar: see `usable_grammar`.

        If calls follow schemas, the grammar is tried here unless it is known, in the lane `compiling`.
        """
        if not isinstance(wanted, ConversationRequest):
            return wanted.named_grammar
        grammars, use = self._engine.maker.grammars, wanted.tool_use
        if use is None or not use.followed:
            return wanted.grammar_in(self._dialect)
        with contextlib.suppress(InvalidGrammarError):
            named = wanted.grammar_in(self._dialect)
            if named is None or grammars.accepts(named[1]):
                return named
        self._engine.check_room(wanted.choices_per_prompt)
        return await self._admission.compiling.run(
            functools.partial(wanted.usable_grammar, self._dialect, grammars.check)
        )

    async def _compile(self, grammar: Grammar | None, choices: int) -> Sequence[Matcher | None]:
        """Return a matcher for each choice, compiled in a lane of its own, while the request holds no place in the
        queue. None for each: there is no grammar, or one that compiles so quickly that it is compiled later, in the
        thread that tokenizes the prompt."""
        if grammar is None:
            return [None] * choices
        compile_s = self._engine.maker.grammars.compile_s(grammar)
        if compile_s is not None and compile_s * choices <= QUICK_COMPILE_S:
            return [None] * choices
        self._engine.check_room(choices)  # nothing is compiled for a request that the queue would refuse

        def compile_all() -> Sequence[Matcher | None]:
            return [self._engine.maker.grammars.new_matcher(grammar) for _ in range(choices)]

        return await self._admission.compiling.run(compile_all)

    def count(self, wanted: ConversationRequest) -> int:
        """Return the number of tokens of a conversation. Any thread may call this.

        Raises:
            InvalidRequestError: the conversation cannot be rendered, or its text is too long.
        """
        (text,) = wanted.prompts(self._dialect)
        return len(self.encode(text, add_special_tokens=wanted.adds_special_tokens))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text that may have more tokens than a request. Any thread may call this.

        Raises:
            InvalidRequestError: the text surely has over `MAX_LENGTHS` times the longest request's tokens. Nothing
                was tokenized.
        """
        tokenizer = self._engine.maker.tokenizer
        at_least = tokenizer.min_tokens(text)
        limit = MAX_LENGTHS * self._engine.facts.max_request_tokens
        if at_least > limit:
            raise InvalidRequestError(
                f"the text has at least {at_least} tokens; at most {limit} are tokenized in one request",
                param="prompt",
            )
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

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
        handling = Handling(
            cache_salt=wanted.cache_salt or "",
            group=answer_id,
            priority=wanted.priority or 0,
            prediction=self._tokenize_prediction(wanted.predicted_text),
            arrived_s=arrived_s,
        )
        scored = 0  # prompt tokens of all choices so far
        try:
            for prompt in wanted.prompts(self._dialect):
                token_ids = self._tokenize(prompt, wanted)
                scored += len(token_ids) * wanted.choices_per_prompt
                _check_prompt_logprobs(wanted, scored)
                max_new_tokens = self._max_new_tokens(wanted, len(token_ids))
                requests += [
                    self._engine.maker.create(
                        token_ids,
                        wanted.sampling_params(choice, max_new_tokens, defaults),
                        f"{answer_id}-{len(requests) + choice}",
                        handling,
                        matchers[len(requests) + choice],
                    )
                    for choice in range(wanted.choices_per_prompt)
                ]
        except InvalidRequestError as error:
            error.param = error.param and wanted.field_of(error.param)
            raise
        return requests

    def _defaults(self, wanted: GenerationRequest, grammar: Grammar | None) -> SamplingParams:
        """Return sampling parameters with the defaults of fields that a request may leave out, and its grammar.

        Special tokens stay in the text if some of them mark thoughts or calls that are looked for.
        """
        reads_markers = wanted.tool_use is not None or (wanted.has_parts and self._dialect.thinks)
        markers = self._engine.maker.tokenizer.special_ids.intersection(self._dialect.special.values())
        return dataclasses.replace(
            self._engine.facts.default_params,
            grammar=grammar,
            skip_special_tokens=not (reads_markers and markers),
        )

    def _tokenize_prediction(self, text: str) -> Sequence[int]:
        """Return the token ids of a predicted text, at most as many as the longest request may have."""
        if not text:
            return ()
        most = self._engine.facts.max_request_tokens
        beginning = text[: CHARACTERS_A_TOKEN * most]
        return self._engine.maker.tokenizer.encode(beginning, add_special_tokens=False)[:most]

    def _tokenize(self, prompt: str | Sequence[int], wanted: GenerationRequest) -> Sequence[int]:
        if not isinstance(prompt, str):
            return wanted.truncated(prompt, self._engine.facts.max_request_tokens)
        if wanted.kept_prompt_tokens is not None:
            token_ids = self.encode(prompt, add_special_tokens=wanted.adds_special_tokens)
            return wanted.truncated(token_ids, self._engine.facts.max_request_tokens)
        at_least = 1 if wanted.cuts_max_tokens else wanted.max_new_tokens or 1
        return self._engine.maker.tokenize(prompt, at_least, add_special_tokens=wanted.adds_special_tokens)

    def _max_new_tokens(self, wanted: GenerationRequest, prompt_tokens: int) -> int:
        """Return the most new tokens of a choice: the requested number, or else the default, or as many as fit.

        A default is cut to those that fit behind the prompt. So is a requested number, unless the body forbids it.

        Raises:
            InvalidRequestError: some new tokens fit, but fewer than `min_tokens`.
        """
        if wanted.max_new_tokens is not None and not wanted.cuts_max_tokens:
            return wanted.max_new_tokens
        room = self._engine.facts.max_request_tokens - prompt_tokens
        if 0 < room < (wanted.min_tokens or 0):
            raise InvalidRequestError(
                f"min_tokens: {wanted.min_tokens} do not fit behind a prompt of {prompt_tokens} tokens",
                param="min_tokens",
            )
        # If no token fits, `RequestMaker.create` refuses the prompt. Parameters must be valid until then.
        most = wanted.max_new_tokens or wanted.default_new_tokens or room
        return max(min(room, most), wanted.min_tokens or 1)


def _check_prompt_logprobs(wanted: GenerationRequest, tokens: int) -> None:
    """Raise InvalidRequestError if an answer would show more than `MAX_PROMPT_LOGPROBS`. `tokens` is the number of
    prompt tokens, counted once for each choice."""
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
