"""What a client asks for, and the life of that request inside the engine.

```text
             admitted           first token            EOS, stop string, length
  WAITING ─────────────> PREFILL ───────────> DECODE ──────────────────────────> FINISHED
     ^                      │                    │
     └───── preempted ──────┴────────────────────┘        from anywhere: FAILED, CANCELLED
```
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Literal

import torch

from common.grammar import Grammar, Matcher
from common.text import IncrementalDetokenizer
from common.token_counts import TokenBiases, TokenCounts

FinishReason = Literal["eos", "stop", "length", "cancelled"]

#: A generator gives the same numbers one by one and many at a time, and for many it is called once.
UNIFORMS_AT_A_TIME = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when they end.

    Raises:
        ValueError: a value is out of its range; the message begins with the field's name.
        TypeError: `stop` is a single string.
    """

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    logit_bias: tuple[
        tuple[int, float], ...
    ] = ()  # token ids and what is added to their logits, before penalties
    logprobs: int | None = None  # None: not reported; n: the sampled token's and the n most likely ones'
    prompt_logprobs: int | None = None  # the same of the prompt's tokens, but for the first
    ignore_eos: bool = False
    min_tokens: int = 0  # before this many tokens no EOS or stop token is sampled, and no stop string ends it
    grammar: Grammar | None = None  # what the answer must look like; it ends when it is complete

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):  # each of its letters would stop the request
            raise TypeError(f"stop is a tuple of strings: write ({self.stop!r},)")
        in_range = {
            "temperature": 0.0 <= self.temperature < math.inf,
            "top_p": 0.0 < self.top_p <= 1.0,
            "top_k": self.top_k is None or self.top_k >= 1,
            "min_p": 0.0 <= self.min_p <= 1.0,
            "repetition_penalty": 0.0 < self.repetition_penalty < math.inf,
            "presence_penalty": math.isfinite(self.presence_penalty),
            "frequency_penalty": math.isfinite(self.frequency_penalty),
            "max_new_tokens": self.max_new_tokens >= 1,
            "stop": all(self.stop),
            "seed": self.seed is None or -(2**63) <= self.seed < 2**64,
            "logit_bias": all(math.isfinite(bias) for _, bias in self.logit_bias),
            "logprobs": self.logprobs is None or 0 <= self.logprobs <= 20,
            "prompt_logprobs": self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20,
            "min_tokens": 0 <= self.min_tokens <= self.max_new_tokens,
        }
        for name, ok in in_range.items():
            if not ok:
                raise ValueError(f"{name} is out of range: {getattr(self, name)!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class RequestState(enum.Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


#: A tuple: asked of every request in every step, and to hash a state takes longer than to compare three.
TERMINAL_STATES = (RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED)

_LEGAL_TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.PREFILL, RequestState.FAILED, RequestState.CANCELLED}),
    RequestState.PREFILL: frozenset(
        {RequestState.DECODE, RequestState.WAITING, RequestState.FAILED, RequestState.CANCELLED}
    ),
    RequestState.DECODE: frozenset({*TERMINAL_STATES, RequestState.WAITING}),
    RequestState.FINISHED: frozenset(),
    RequestState.FAILED: frozenset(),
    RequestState.CANCELLED: frozenset(),
}


class IllegalTransitionError(RuntimeError):
    """A request was moved to a state that its present state does not lead to."""


@dataclass(slots=True, eq=False)
class Request:
    """One sequence: its prompt, what has been generated, and where it stands.

    Only the engine's thread touches a request once it has been added.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    detokenizer: IncrementalDetokenizer | None = None  # None: token ids only, no text and no stop strings
    cache_salt: str = ""  # only requests with the same one share memory
    matcher: Matcher | None = None  # of `params.grammar`; knows the generated tokens, and no others
    group: str = ""  # requests of one group share seats as one request would; "": a group of its own
    arrived_s: float | None = (
        None  # when it reached the server, on the engine's clock; None: when it was added
    )

    state: RequestState = field(default=RequestState.WAITING, init=False)
    token_ids: list[int] = field(init=False)  # prompt + generated: what a prefill after preemption computes
    ending_token_ids: frozenset[int] = field(init=False)  # end it when sampled; none is, before `min_tokens`
    token_counts: TokenCounts | None = field(default=None, init=False)  # None: no penalties
    token_biases: TokenBiases | None = field(default=None, init=False)  # None: no logit bias
    takes_best: bool = field(init=False)  # greedy, and nothing else about its tokens is asked or changed
    slot: int | None = field(default=None, init=False)  # the KV pool's handle while memory is held
    prefill_progress: int = field(default=0, init=False)  # how many of token_ids the cache holds
    prefill_start: int = field(default=0, init=False)  # how many of them it held before any was computed
    cached_tokens: int = field(default=0, init=False)  # the same, when this request was first admitted
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)  # from its second token on
    preempted: bool = field(default=False, init=False)
    inflight_refs: int = field(default=0, init=False)  # steps launched with it and not committed
    pending_tokens: int = field(
        default=0, init=False
    )  # sampled in those: it has them, and nobody has read them
    arrival: int = field(default=0, init=False)  # order of arrival at the engine; survives preemption
    scheduled_s: float | None = field(
        default=None, init=False
    )  # when its first chunk was planned, engine's clock
    _generator: torch.Generator = field(init=False)
    _uniforms: list[float] = field(default_factory=list, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    error: Exception | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError("prompt_token_ids is empty: a request needs at least one token")
        self.token_ids = list(self.prompt_token_ids)
        params = self.params
        # Under a grammar EOS is ignored by not being sampled, as long as there is anything else.
        ignored = params.ignore_eos and self.matcher is None
        self.ending_token_ids = frozenset(params.stop_token_ids).union(() if ignored else self.eos_token_ids)
        if params.has_penalties:
            with_prompt = params.repetition_penalty != 1.0
            self.token_counts = TokenCounts(
                self.prompt_token_ids, params.max_new_tokens, with_prompt=with_prompt
            )
        if params.logit_bias:
            self.token_biases = TokenBiases(params.logit_bias)
        self.takes_best = (
            params.greedy
            and self.token_counts is None
            and self.token_biases is None
            and not params.min_tokens
            and params.logprobs is None
        )
        self.seed_generator(params.seed if params.seed is not None else 0)

    def seed_generator(self, seed: int) -> None:
        """Start this request's own stream of random numbers: on the CPU, so that every device draws alike."""
        self._generator = torch.Generator("cpu").manual_seed(seed % 2**64)
        self._uniforms.clear()

    def next_uniform(self, ahead: int = 0) -> float:
        """Return the number in [0, 1) that decides the next token: the n-th of the stream for the n-th token.

        Args:
            ahead: decide the token that comes so many places after the next one.

        Asking again before that token is sampled gives the same number, so a pass that is tried again, or a
        prefill after preemption, draws what it would have drawn.
        """
        place = self.num_generated_tokens + self.pending_tokens + ahead
        while len(self._uniforms) <= place:
            drawn = torch.rand(UNIFORMS_AT_A_TIME, generator=self._generator, dtype=torch.float64)
            self._uniforms += drawn.tolist()
        return self._uniforms[place]

    # ------------------------------------------------------------------ what it holds

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens, those that nobody has read yet included."""
        return len(self.token_ids) + self.pending_tokens

    @property
    def max_total_tokens(self) -> int:
        """Prompt and generated tokens at the most: what its KV memory can grow to."""
        return len(self.prompt_token_ids) + self.params.max_new_tokens

    @property
    def has_begun(self) -> bool:
        """Whether any of it has been computed since it was admitted."""
        return self.prefill_progress > self.prefill_start

    @property
    def held_back_token_ids(self) -> frozenset[int]:
        """Endings that may not be sampled now; under a grammar, unless it leaves nothing else."""
        if self.num_generated_tokens + self.pending_tokens < self.params.min_tokens:
            return self.ending_token_ids
        return self.eos_token_ids if self.params.ignore_eos and self.matcher is not None else frozenset()

    @property
    def waits_for_its_tokens(self) -> bool:
        """Whether its next token cannot be chosen before the one before it has been read."""
        return self.matcher is not None or self.token_counts is not None

    @property
    def wants_token(self) -> bool:
        """Whether its next token is to be computed: it decodes, and may have one more."""
        return self.state is RequestState.DECODE and self.num_tokens < self.max_total_tokens

    @property
    def is_terminal(self) -> bool:
        return self.state in TERMINAL_STATES

    @property
    def is_done(self) -> bool:
        """Whether it has ended and no step on its way computes for it any more."""
        return self.is_terminal and self.inflight_refs == 0

    # ------------------------------------------------------------------ transitions

    def start_prefill(self) -> None:
        self._move_to(RequestState.PREFILL)

    def start_decode(self) -> None:
        self._move_to(RequestState.DECODE)

    def start_after(self, tokens: int) -> None:
        """So many tokens are in the cache already: prefill begins after them."""
        self.prefill_start = self.prefill_progress = tokens
        if not self.preempted:  # what one finds that was here before may be its own
            self.cached_tokens = tokens

    def preempt(self) -> None:
        """Return to the queue with everything generated so far. Its memory is released after this call."""
        self._move_to(RequestState.WAITING)
        self.preempted = True
        self.prefill_progress = self.prefill_start = 0

    def finish(self, reason: FinishReason) -> None:
        self._move_to(RequestState.FINISHED)
        self.finish_reason = reason

    def fail(self, error: Exception) -> None:
        self._move_to(RequestState.FAILED)
        self.error = error

    def cancel(self) -> None:
        self._move_to(RequestState.CANCELLED)
        self.finish_reason = "cancelled"

    def _move_to(self, state: RequestState) -> None:
        if state not in _LEGAL_TRANSITIONS[self.state]:
            raise IllegalTransitionError(
                f"request {self.request_id}: {self.state.value} does not lead to {state.value}"
            )
        self.state = state


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities under the model's own distribution (before temperature and filters)."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first
    rank: int | None = None  # of a prompt's token, 1 for the likeliest; nobody asks for a sampled token's


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one engine step has to say to one client.

    A request's last output has `finished` set: with a `finish_reason`, or with an `error`.
    """

    request_id: str
    token_id: int | None
    text_delta: str
    finished: bool
    finish_reason: FinishReason | None
    error: Exception | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # of the prompt: found in memory, and not computed
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # once, with the first token, if asked for
