"""Makes requests: prompts become token ids, and prompts and parameters are checked against an engine's limits.

In a server, this runs in the process that answers HTTP requests. The engine is in another (`common.hosting`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.constrained.allowed_tokens import AllowedTokens
from common.constrained.grammar import GrammarCompiler, Matcher
from common.engine.config import EngineConfig
from common.errors import ContextLengthError, InvalidPromptError, InvalidRequestError
from common.request import Request, SamplingParams
from common.text.tokenizer import IncrementalDetokenizer, Tokenizer

if TYPE_CHECKING:
    from kernels.dispatch import Kernels  # imports torch, which a server's own process does without


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """The properties of an engine that stay the same for its life. They can be pickled.

    Attributes:
        config: the options. `max_seq_len` is resolved.
        default_params: the sampling parameters of requests that name none: those that the model suggests, if they
            are used.
        vocab_size, eos_token_ids: those of the model.
        tokenizer_files: as `Tokenizer.files`.
        dtype, weight_dtype, device: where and in which format the model is computed, as names: `float32`, `cpu`.
        kernels: the kernels that compute the model's passes, as `kernels_on` names them.
        batch_invariant: whether a request's tokens are the same in every batch.
        has_priorities: whether requests may have a priority other than 0.
        pool_limit: the most tokens of one request that the KV memory allows; None: it sets no limit.
    """

    phase: Phase
    config: EngineConfig
    default_params: SamplingParams
    vocab_size: int
    eos_token_ids: frozenset[int]
    tokenizer_files: Path | None
    dtype: str
    weight_dtype: str
    device: str
    kernels: Kernels
    batch_invariant: bool
    has_priorities: bool
    pool_limit: int | None

    @property
    def max_seq_len(self) -> int:
        """The most tokens of one request, prompt and new ones, if the KV memory allows as many."""
        assert self.config.max_seq_len is not None, "an engine's config has its max_seq_len resolved"
        return self.config.max_seq_len

    @property
    def max_request_tokens(self) -> int:
        """The most tokens of one request, prompt and new ones, that `max_seq_len` and the KV memory allow."""
        return self.max_seq_len if self.pool_limit is None else min(self.max_seq_len, self.pool_limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handling:
    """How an engine treats a request, beside its sampling parameters.

    Attributes:
        cache_salt: only requests with the same salt share cached prefixes.
        group: requests of one group together get one fair share of the seats (places in the batch). The choices of
            one HTTP request are a group. "": the request is alone in its group.
        priority: requests with a lower number go first.
        prediction: tokens that the answer is expected to have. Phase 10 guesses from them. A guess enters the
            answer only if it equals the sampled token.
        arrived_s: when the request reached the server, on the engine's clock; None: when the engine adds it.
            `request_timeout` counts from then.
    """

    cache_salt: str = ""
    group: str = ""
    priority: int = 0
    prediction: Sequence[int] = ()
    arrived_s: float | None = None


class RequestMaker:
    """Makes requests for an engine.

    Args:
        facts: the engine's properties.
        tokenizer: the model's tokenizer.
        grammars: checks and compiles the grammars of requests.
    """

    def __init__(self, facts: EngineFacts, tokenizer: Tokenizer, grammars: GrammarCompiler) -> None:
        self.facts = facts
        self.tokenizer = tokenizer
        self.grammars = grammars
        self._vocab_size = facts.vocab_size
        self._ids = itertools.count()
        # The choices of a request share their allowed tokens. A server makes the choices of two requests at a time.
        self._allowed_tokens = functools.lru_cache(maxsize=2)(self._new_allowed_tokens)

    def create(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        handling: Handling = Handling(),
        matcher: Matcher | None = None,
    ) -> Request:
        """Return a new request, after checking its prompt and parameters against the engine's limits.

        Any thread may call this, but not an event loop's thread if there is a grammar without a `matcher`: making
        one may block (see `GrammarCompiler.check`).

        Args:
            prompt: text (the tokenizer adds its special tokens), or token ids (nothing is added).
            params: how to sample and when to end.
            request_id: unique among the live requests; generated if None.
            handling: how the engine treats the request.
            matcher: the matcher of `params.grammar`, if it was made before.

        Raises:
            InvalidPromptError: the prompt is empty, or has token ids outside the vocabulary.
            ContextLengthError: the prompt, or the prompt with `max_new_tokens`, is too long.
            InvalidRequestError: `max_new_tokens` leaves no room for any prompt, a parameter names an unknown token,
                no token may be sampled, or the priority is not 0 and this phase has no priorities.
            InvalidGrammarError, ShuttingDownError: as `GrammarCompiler.new_matcher`.
            EngineDeadError: compiling needs the engine's process, and it has ended.
        """
        token_ids = self._token_ids(prompt, params.max_new_tokens)
        allowed = self._checked(params, handling.priority)
        if matcher is None and params.grammar is not None:
            matcher = self.grammars.new_matcher(params.grammar)
        detokenizer = IncrementalDetokenizer(
            self.tokenizer,
            token_ids,
            params.stop,
            params.min_tokens,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )
        return Request(
            request_id=request_id if request_id is not None else f"request-{next(self._ids)}",
            prompt_token_ids=token_ids,
            params=params,
            eos_token_ids=self.facts.eos_token_ids,
            detokenizer=detokenizer,
            cache_salt=handling.cache_salt,
            matcher=matcher,
            allowed=allowed,
            priority=handling.priority,
            group=handling.group,
            arrived_s=handling.arrived_s,
            # Ids beyond the model's vocabulary cannot be computed, and no answer has them.
            prediction=tuple(itertools.takewhile(lambda each: each < self._vocab_size, handling.prediction)),
        )

    def tokenize(self, text: str, new_tokens: int = 1, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt's text. Any thread may call this.

        Raises:
            ContextLengthError: the text is so long that prompt and `new_tokens` exceed the limit in any case.
                Nothing was tokenized.
            InvalidRequestError: `new_tokens` leave no room for any prompt.
        """
        self._check_length(self.tokenizer.min_tokens(text), new_tokens, exact=False)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens) if text else []

    def _token_ids(self, prompt: str | Sequence[int], new_tokens: int) -> list[int]:
        """Return the token ids of a prompt, which fits and has no unknown ones."""
        token_ids = self.tokenize(prompt, new_tokens) if isinstance(prompt, str) else list(prompt)
        if not token_ids:
            raise InvalidPromptError("the prompt is empty; send at least one token", param="prompt")
        self._check_length(len(token_ids), new_tokens)  # before a check that is slow on two megabytes of ids
        outside = self._first_unknown(token_ids)
        if outside is not None:
            raise InvalidPromptError(
                f"token id {outside} is not in the vocabulary of {self._vocab_size}", param="prompt"
            )
        return token_ids

    def _checked(self, params: SamplingParams, priority: int) -> AllowedTokens | None:
        """Check a request's parameters. Returns the tokens that they allow; None: all tokens."""
        self._check_known("stop_token_ids", params.stop_token_ids)
        self._check_known("logit_bias", [token_id for token_id, _ in params.logit_bias])
        if priority and not self.facts.has_priorities:
            raise InvalidRequestError(
                f"priority: {self.facts.phase.slug} serves requests as they arrive; send 0, or leave it out",
                param="priority",
            )
        ids = params.allowed_token_ids
        return self._allowed_tokens(None if ids is None else tuple(ids), tuple(params.bad_words))

    def _new_allowed_tokens(
        self, token_ids: tuple[int, ...] | None, bad_words: tuple[str, ...]
    ) -> AllowedTokens | None:
        self._check_known("allowed_token_ids", token_ids or ())
        allowed = AllowedTokens.of(self.tokenizer, token_ids, bad_words)
        if allowed is not None and allowed.is_empty:
            raise InvalidRequestError("bad_words: they forbid every allowed token", param="bad_words")
        return allowed

    def _check_length(self, prompt_tokens: int, new_tokens: int, *, exact: bool = True) -> None:
        """Raise an error if a request is too long. Unless `exact`, `prompt_tokens` is a lower bound.

        Agents shorten a conversation if they know the refusal by its text, which has Anthropic's words (`prompt is
        too long: …`), and those of OpenAI and vLLM (`maximum context length is …`).
        """
        limit = self.facts.max_request_tokens
        at_least = "" if exact else "at least "
        most = f"This model's maximum context length is {limit} tokens on this server"
        if prompt_tokens >= limit:
            raise ContextLengthError(
                f"prompt is too long: {at_least}{prompt_tokens} tokens > {limit - 1} maximum. {most}, of which "
                "an answer needs one",
                param="prompt",
            )
        if new_tokens >= limit:
            raise InvalidRequestError(
                f"max_tokens {new_tokens} leaves no room for a prompt; this server holds {limit} a request",
                param="max_tokens",
            )
        if prompt_tokens + new_tokens > limit:
            raise ContextLengthError(
                f"{most}. However, you requested {new_tokens} output tokens (max_tokens) and your prompt contains "
                f"{at_least}{prompt_tokens} input tokens, for a total of {at_least}{prompt_tokens + new_tokens} "
                "tokens",
                param="max_tokens",
            )

    def _check_known(self, param: str, token_ids: Collection[int]) -> None:
        """Raise InvalidRequestError if the parameter `param` has a token id outside the vocabulary."""
        beyond = self._first_unknown(token_ids)
        if beyond is not None:
            raise InvalidRequestError(
                f"{param}: token id {beyond} is not in the vocabulary of {self._vocab_size}", param=param
            )

    def _first_unknown(self, token_ids: Collection[int]) -> int | None:
        """Return the first token id that is not in the vocabulary; None if all are."""
        return next((each for each in token_ids if not 0 <= each < self._vocab_size), None)
