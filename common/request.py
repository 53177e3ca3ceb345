"""A request: its sampling parameters, its tokens, and its states inside the engine.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from common.constrained.allowed_tokens import AllowedTokens, Mask
from common.constrained.grammar import Grammar, Matcher, without
from common.text.tokenizer import IncrementalDetokenizer

FinishReason = Literal["eos", "stop", "length", "cancelled"]

#: How many random numbers one call draws. A call for each number would be slower, and give the same numbers.
UNIFORMS_AT_A_TIME = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are sampled, and when it ends.

    Raises:
        ValueError: a value is out of range; the message begins with the field's name.
        TypeError: `stop` or `bad_words` is a single string.
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
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, number added to its logit before penalties)
    logprobs: int | None = None  # None: not reported; n: of the sampled token and the n most likely tokens
    prompt_logprobs: int | None = None  # the same for each prompt token except the first
    allowed_token_ids: tuple[int, ...] | None = None  # no other token is sampled; None: all are allowed
    bad_words: tuple[str, ...] = ()  # no token is sampled that completes one (`AllowedTokens`)
    include_stop_str_in_output: bool = False  # keep the stop string or token that ends the answer in its text
    skip_special_tokens: bool = True  # special tokens are left out of the text
    ignore_eos: bool = False
    min_tokens: int = 0  # EOS, stop tokens and stop strings do not end a shorter answer; its grammar may
    grammar: Grammar | None = None  # the answer must match it; the request ends when the match is complete

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):  # each of its letters would stop the request
            raise TypeError(f"stop is a tuple of strings: write ({self.stop!r},)")
        if isinstance(self.bad_words, str):
            raise TypeError(f"bad_words is a tuple of strings: write ({self.bad_words!r},)")
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
            "allowed_token_ids": self.allowed_token_ids is None or bool(self.allowed_token_ids),
            "bad_words": all(word.strip() for word in self.bad_words),
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
    def penalties(self) -> tuple[float, float, float]:
        """The repetition, frequency and presence penalty."""
        return self.repetition_penalty, self.frequency_penalty, self.presence_penalty

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


#: A tuple, since this is checked for every request in every step: three comparisons are faster than a hash.
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
    """The request's present state does not lead to the new state."""


class TokenCounts:
    """The tokens that a request's penalties apply to, and how often each was generated.

    Only tokens that occurred have an entry, of 12 bytes. Memory is allocated for `max_new_tokens` entries and, if
    `with_prompt`, for each different token of the prompt. A count for each token of the vocabulary would take half
    a megabyte.

    Args:
        prompt: the request's prompt.
        max_new_tokens: the most tokens that the request can generate.
        with_prompt: whether the prompt's tokens are penalised, too.
    """

    def __init__(self, prompt: Sequence[int], max_new_tokens: int, *, with_prompt: bool) -> None:
        known = dict.fromkeys(prompt) if with_prompt else {}
        self._places = {token_id: place for place, token_id in enumerate(known)}
        # [3, n]: row of the pass, token id, times generated. One column for each token.
        self._entries = np.zeros((3, len(known) + max_new_tokens), dtype=np.int32)
        self._entries[1, : len(known)] = list(known)
        self._counted = len(prompt)
        self._row = 0

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """Count the tokens that are new since the last call. `token_ids`: prompt and all generated tokens."""
        for token_id in token_ids[self._counted :]:
            place = self._places.setdefault(token_id, len(self._places))
            self._entries[:2, place] = self._row, token_id
            self._entries[2, place] += 1
        self._counted = len(token_ids)

    def at_row(self, row: int) -> npt.NDArray[np.int32]:
        """Return the request's entries for a pass in which it has row `row`.

        Returns:
            [3, n]: the row, each token once, and how often it was generated (0 for tokens of the prompt alone).
            Valid until the next call of a method.
        """
        entries = self._entries[:, : len(self._places)]
        if row != self._row:
            entries[0] = self._row = row
        return entries

    def guessed(self, row: int, token_ids: Sequence[int]) -> npt.NDArray[np.int32]:
        """Return a new array: the entries that `at_row` would have if these tokens had been generated, too."""
        known = self._entries[:, : len(self._places)]
        new = [token_id for token_id in dict.fromkeys(token_ids) if token_id not in self._places]
        entries = np.pad(known, ((0, 0), (0, len(new))))
        entries[0] = row
        entries[1, known.shape[1] :] = new
        places = self._places | {token_id: known.shape[1] + i for i, token_id in enumerate(new)}
        for token_id in token_ids:
            entries[2, places[token_id]] += 1
        return entries


class TokenBiases:
    """The tokens whose scores a request's biases change.

    Args:
        biases: token ids and biases.

    Attributes:
        values: [b] float32, the biases.
    """

    def __init__(self, biases: Sequence[tuple[int, float]]) -> None:
        token_ids, values = zip(*biases, strict=True)
        self.values = np.array(values, dtype=np.float32)
        self._entries = np.array([[0] * len(token_ids), token_ids], dtype=np.int32)

    def at_row(self, row: int) -> npt.NDArray[np.int32]:
        """Return the entries for a pass in which the request has row `row`: [2, b], the row and each token."""
        entries = self._entries.copy()
        entries[0] = row
        return entries


class SamplingState:
    """What sampling a request's tokens needs beside the tokens, made once from its parameters.

    Args:
        prompt: the request's prompt.
        params: its parameters.
        matcher, allowed: as for `Request`.

    Attributes:
        counts: for penalties; None: it has none.
        biases: None: no logit is changed.
        draws_at_seat: its tokens can be sampled within a GPU's decode step: no grammar, bias, …, logprobs. It may
            have penalties.
        takes_best: greedy, without a bias, penalty, …, or logprobs. It may have a grammar.
        waits_for_tokens: sampling needs its latest token on the host (grammar, …).
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        matcher: Matcher | None,
        allowed: AllowedTokens | None,
    ) -> None:
        self.counts: TokenCounts | None = None
        if params.has_penalties:
            with_prompt = params.repetition_penalty != 1.0
            self.counts = TokenCounts(prompt, params.max_new_tokens, with_prompt=with_prompt)
        self.biases = TokenBiases(params.logit_bias) if params.logit_bias else None
        unchanged = (
            allowed is None and self.biases is None and not params.min_tokens and params.logprobs is None
        )
        self.draws_at_seat = unchanged and matcher is None
        self.takes_best = unchanged and self.counts is None and params.greedy
        self.waits_for_tokens = matcher is not None or (allowed is not None and allowed.context > 0)
        self.seed(params.seed if params.seed is not None else 0)

    def seed(self, seed: int) -> None:
        """Seed the random numbers. They are drawn on the CPU, so they are the same for every device."""
        self._random = random_numbers(seed)
        self._uniforms: list[float] = []

    def uniform(self, place: int) -> float:
        """Return the random number in [0, 1) that decides the generated token at `place`. The first place is 0."""
        while len(self._uniforms) <= place:
            self._uniforms.append(next(self._random))
        return self._uniforms[place]


def random_numbers(seed: int) -> Iterator[float]:
    """Yield random numbers in [0, 1) without end."""
    import torch  # only where tokens are drawn: the process that answers HTTP requests does without it

    generator = torch.Generator("cpu").manual_seed(seed % 2**64)
    while True:
        yield from torch.rand(UNIFORMS_AT_A_TIME, generator=generator, dtype=torch.float64).tolist()


@dataclass(slots=True)
class Drafts:
    """Guesses of a request's next tokens. Only phase 10 makes any.

    Attributes:
        token_ids: the guesses that the next step computes and verifies.
        guessed: how many guesses were set so far.
        accepted: how many of them equalled the sampled token.
        run: how many were accepted since the last call of `guess`.
    """

    token_ids: list[int] = field(default_factory=list)
    guessed: int = 0
    accepted: int = 0
    run: int = 0

    def guess(self, token_ids: Sequence[int]) -> None:
        """Set guesses of the tokens after the latest token."""
        self.token_ids = list(token_ids)
        self.guessed += len(token_ids)
        self.run = 0

    def verify(self, token_id: int) -> bool:
        """Return whether a sampled token equals the next guess. Removes this guess. If it was wrong, removes all
        later guesses, too."""
        if self.token_ids.pop(0) == token_id:
            self.accepted += 1
            self.run += 1
            return True
        self.token_ids.clear()
        return False


@dataclass(slots=True, eq=False)
class Request:
    """One sequence: its prompt, its generated tokens, and its state.

    Once a request has been added to an engine, only the engine's thread may change it.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    detokenizer: IncrementalDetokenizer | None = None  # None: token ids only, no text and no stop strings
    cache_salt: str = ""  # only requests with the same salt share cached prefixes
    matcher: Matcher | None = None  # follows the generated tokens through `params.grammar`
    allowed: AllowedTokens | None = None  # for `params.allowed_token_ids` and `bad_words`; None: all tokens
    priority: int = 0  # lower numbers go first
    group: str = ""  # requests of one group get one fair share of the seats together; "": a group of one
    prediction: Sequence[int] = ()  # tokens that the client expects in the answer; phase 10 guesses from them
    arrived_s: float | None = None  # arrival at the server, engine's clock; None: when the engine adds it

    state: RequestState = field(default=RequestState.WAITING, init=False)
    token_ids: list[int] = field(init=False)  # prompt + generated; a preempted request prefills both
    ending_token_ids: frozenset[int] = field(init=False)  # EOS and stop tokens, which end the request
    max_total_tokens: int = field(init=False)  # prompt and generated; the most columns that it ever needs
    sampling: SamplingState = field(init=False)
    slot: int | None = field(default=None, init=False)  # the KV pool's handle while memory is held
    prefill_progress: int = field(default=0, init=False)  # tokens whose keys and values are in the KV cache
    prefill_start: int = field(default=0, init=False)  # tokens that were a prefix hit in this admission
    cached_tokens: int = field(default=0, init=False)  # `prefill_start` before anything is computed
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)  # from the second token on
    preemptions: int = field(default=0, init=False)  # how often it was preempted
    recomputes: bool = field(default=False, init=False)  # was preempted after tokens of it were computed
    inflight_refs: int = field(default=0, init=False)  # number of steps in flight that compute for it
    pending_tokens: int = field(default=0, init=False)  # sampled on the device, not yet copied to the host
    drafts: Drafts = field(default_factory=Drafts, init=False)
    fetching: bool = field(default=False, init=False)  # blocks of its prefix are being read from a disk
    arrival: int = field(default=0, init=False)  # order of arrival at the engine; survives preemption
    scheduled_s: float | None = field(default=None, init=False)  # planning of its first chunk, engine's clock
    finish_reason: FinishReason | None = field(default=None, init=False)
    error: Exception | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError("prompt_token_ids is empty: a request needs at least one token")
        self.token_ids = list(self.prompt_token_ids)
        params = self.params
        self.max_total_tokens = len(self.prompt_token_ids) + params.max_new_tokens
        # Under a grammar, ignoring EOS means not to sample it while any other token is allowed.
        ignored = params.ignore_eos and params.grammar is None
        self.ending_token_ids = frozenset(params.stop_token_ids).union(() if ignored else self.eos_token_ids)
        self.sampling = SamplingState(self.prompt_token_ids, params, self.matcher, self.allowed)

    def next_uniform(self, ahead: int = 0) -> float:
        """Return the random number in [0, 1) that decides the next token: the n-th number for the n-th token.

        Until that token is sampled, each call returns the same number. So a pass that is retried, or a prefill
        after preemption, uses the same number again.

        Args:
            ahead: 0 for the next token, 1 for the token after it, and so on.
        """
        return self.sampling.uniform(self.num_generated_tokens + self.pending_tokens + ahead)

    # ------------------------------------------------------------------ tokens and state

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Number of prompt and generated tokens, including pending ones."""
        return len(self.token_ids) + self.pending_tokens

    @property
    def has_begun(self) -> bool:
        """Whether any of its tokens have been computed since it was admitted."""
        return self.prefill_progress > self.prefill_start

    def held_back_token_ids(self, ahead: int = 0) -> frozenset[int]:
        """Return the EOS and stop tokens that may not be sampled next: because of `min_tokens`, or under a grammar
        because of `ignore_eos`.

        These tokens are allowed only if the grammar allows no other token. `ahead`: as for `next_uniform`.
        """
        if self.num_generated_tokens + self.pending_tokens + ahead < self.params.min_tokens:
            return self.ending_token_ids
        return self.eos_token_ids if self.params.ignore_eos and self.matcher is not None else frozenset()

    @property
    def is_masked(self) -> bool:
        """True if its grammar, its allowed tokens or its bad words restrict which tokens are sampled."""
        return self.matcher is not None or self.allowed is not None

    def masks(self) -> Sequence[Mask]:
        """Return a mask for the next token and for the token after each of its `drafts`: [W] each.

        If a guess completes the grammar's text, no mask follows for the token after it. Blocks until the grammar's
        masks are computed.

        Raises:
            GrammarFailedError: see `Matcher.mask`.
        """
        if self.matcher is None:
            assert self.allowed is not None, "a request that is masked"
            return [
                self.allowed.mask(self._context(ahead)) for ahead in range(1 + len(self.drafts.token_ids))
            ]
        masks = [self.matcher.mask(), *self.matcher.guessed_masks(self.drafts.token_ids)]
        if self.allowed is not None:
            masks = [mask & self.allowed.mask(self._context(ahead)) for ahead, mask in enumerate(masks)]
        return [without(mask, self.held_back_token_ids(ahead)) for ahead, mask in enumerate(masks)]

    def _context(self, ahead: int) -> Sequence[int]:
        """Return the latest generated tokens, at most `allowed.context`, followed by the first `ahead` guesses."""
        assert self.allowed is not None
        first = max(len(self.prompt_token_ids), len(self.token_ids) - self.allowed.context)
        return [*self.token_ids[first:], *self.drafts.token_ids[:ahead]]

    @property
    def rank(self) -> tuple[int, int]:
        """The request's sort key in the queue: priority, then arrival. The lowest goes first."""
        return self.priority, self.arrival

    @property
    def wants_token(self) -> bool:
        """Whether to compute a next token: the request decodes and has fewer than `max_total_tokens` tokens."""
        return self.state is RequestState.DECODE and self.num_tokens < self.max_total_tokens

    @property
    def wants_prefill(self) -> bool:
        """Whether its prompt may be computed in the next step: it has a seat, and no block is read for it."""
        return self.state is RequestState.PREFILL and not self.fetching

    @property
    def is_terminal(self) -> bool:
        return self.state in TERMINAL_STATES

    @property
    def is_done(self) -> bool:
        """True once the request has ended and no step in flight computes for it: its memory may be freed."""
        return self.inflight_refs == 0 and self.is_terminal

    # ------------------------------------------------------------------ transitions

    def start_prefill(self) -> None:
        self._move_to(RequestState.PREFILL)

    def start_decode(self) -> None:
        self._move_to(RequestState.DECODE)

    def start_after(self, tokens: int) -> None:
        """Let the prefill begin after the first `tokens` tokens, which are already in the cache."""
        self.prefill_start = self.prefill_progress = tokens
        if not self.recomputes:  # else these may be blocks that the request has computed itself
            self.cached_tokens = tokens

    def preempt(self) -> None:
        """Move the request back to WAITING. It keeps its generated tokens. The engine frees its memory next."""
        self._move_to(RequestState.WAITING)
        self.drafts.token_ids.clear()
        self.preemptions += 1
        self.recomputes |= self.prefill_progress > self.prefill_start
        self.prefill_progress = self.prefill_start = 0

    def finish(self, reason: FinishReason) -> None:
        self._move_to(RequestState.FINISHED)
        self.finish_reason = reason

    def fail(self, error: Exception) -> None:
        self._move_to(RequestState.FAILED)
        self.error = error

    def cancel(self, reason: FinishReason = "cancelled") -> None:
        self._move_to(RequestState.CANCELLED)
        self.finish_reason = reason

    def _move_to(self, state: RequestState) -> None:
        if state not in _LEGAL_TRANSITIONS[self.state]:
            raise IllegalTransitionError(
                f"request {self.request_id}: {self.state.value} does not lead to {state.value}"
            )
        self.state = state


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of a token and of the most likely tokens in its place, under the model's own distribution
    (before temperature and filters)."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first
    rank: int | None = None  # 1 for the most likely token; for prompt tokens only


@dataclass(slots=True)
class StepOutput:
    """One output of an engine step for one request: a new token with its text, or an end without a token.

    A step has several outputs for a request if guesses are accepted. The terminal output has `finished` set, and a
    `finish_reason` or an `error`.
    """

    request_id: str
    token_id: int | None
    text_delta: str
    text_offset: int  # characters of the answer before the token, with those held back; 0 without a token
    finished: bool
    finish_reason: FinishReason | None
    error: Exception | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # prompt tokens that were prefix hits
    draft_tokens: int = 0  # guesses that were computed for the request so far
    accepted_tokens: int = 0  # guesses among them that equalled the sampled token
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # with the first token only, if requested
