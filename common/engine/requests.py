"""The part of an engine that prepares requests: prompts become token ids, and limits are checked.

In a server, this part runs in the process that answers HTTP requests. The engine itself may run in another process
(`common.hosting.process`).
"""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from common.constrained.allowed_tokens import AllowedTokens
from common.constrained.grammar import Grammar, GrammarCompiler, Matcher
from common.engine.config import EngineConfig
from common.engine.scheduling import Clock
from common.engine.telemetry import Telemetry
from common.errors import EngineDeadError, InvalidPromptError, InvalidRequestError
from common.models.config import ModelConfig
from common.request import Request, SamplingParams
from common.text.tokenizer import IncrementalDetokenizer, Tokenizer
from kernels.dispatch import Kernels


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


class ModelFacts(Protocol):
    """The facts about a model that a server needs. A loaded model has these attributes."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def weight_dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def batch_invariant(self) -> bool: ...


class EngineFront(ABC):
    """Prepares requests for an engine, and knows the engine's limits and telemetry.

    Attributes:
        dead: the error that ended the engine; None while it runs.
        default_params: the default sampling parameters of requests: those of the model's `generation_config.json`,
            if it is used.
        max_seq_len: the most tokens of one request, prompt and new ones, if the KV memory allows as many.
        paused: True from `Engine.pause` to `Engine.resume`. While it is True, steps compute nothing new.
    """

    def __init__(
        self,
        *,
        phase: Phase,
        config: EngineConfig,
        tokenizer: Tokenizer,
        grammars: GrammarCompiler,
        telemetry: Telemetry,
        default_params: SamplingParams,
        clock: Clock,
    ) -> None:
        assert config.max_seq_len is not None, "an engine's config has its max_seq_len resolved"
        self.phase = phase
        self.config = config
        self.tokenizer = tokenizer
        self.grammars = grammars
        self.telemetry = telemetry
        self.default_params = default_params
        self.clock = clock
        self.max_seq_len = config.max_seq_len
        self.dead: EngineDeadError | None = None
        self.paused = False
        self._ids = itertools.count()
        # The choices of a request share their allowed tokens. A server makes the choices of two requests at a time.
        self._allowed_tokens = functools.lru_cache(maxsize=2)(functools.partial(_allowed_tokens, tokenizer))

    @property
    @abstractmethod
    def model(self) -> ModelFacts:
        """The served model. If the engine is in another process, only the model's properties."""

    @property
    @abstractmethod
    def kernels(self) -> Kernels:
        """The kernels that compute the model's passes, as `kernels_on` names them."""

    @property
    @abstractmethod
    def has_priorities(self) -> bool:
        """Whether requests may have a priority other than 0."""

    @property
    @abstractmethod
    def pool_limit(self) -> int | None:
        """The most tokens of one request that the KV memory allows; None: it sets no limit."""

    @abstractmethod
    def new_matcher(self, grammar: Grammar) -> Matcher:
        """Check a grammar. Returns a matcher for one request. May block: see `GrammarCompiler.check`.

        Raises:
            EngineDeadError: compiling needs an engine's process, and it has ended. Other errors are those of
                `GrammarCompiler.new_matcher`.
        """

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
        """Create a request after checking its prompt and parameters against this engine's limits.

        Any thread may call this, but not an event loop's thread if there is a grammar without a `matcher`. In this
        case `new_matcher` is called, which may block.

        Args:
            prompt: text (the tokenizer adds its special tokens), or token ids (nothing is added).
            params: how to sample and when to end.
            request_id: unique among the live requests; generated if None.
            cache_salt: only requests with the same salt share cached prefixes.
            group: requests of one group together get one fair share of the seats (places in the batch). The choices
                of one HTTP request are a group. "": the request is alone in its group.
            arrived_s: when the request reached the server, on the engine's clock; None: when the engine adds it.
                `request_timeout` counts from then.
            matcher: the matcher of `params.grammar`, if it was made before.
            prediction: tokens that the answer is expected to have. Phase 10 guesses from them. A guess enters the
                answer only if it equals the sampled token.
            priority: requests with a lower number go first.

        Raises:
            InvalidPromptError: the prompt is empty, or has token ids outside the vocabulary.
            InvalidRequestError: prompt and `max_new_tokens` are too long, a parameter names an unknown token, no
                token may be sampled, or `priority` is not 0 and this phase has no priorities.
            InvalidGrammarError, ShuttingDownError, EngineDeadError: as `new_matcher`, if it is called.
        """
        new_tokens = params.max_new_tokens
        token_ids = self.tokenize(prompt, new_tokens) if isinstance(prompt, str) else list(prompt)
        if not token_ids:
            raise InvalidPromptError("the prompt is empty; send at least one token", param="prompt")
        self._check_length(len(token_ids), new_tokens)  # first: later checks are slow on two megabytes of ids
        vocab_size = self.model.config.vocab_size
        outside = next((i for i in token_ids if not 0 <= i < vocab_size), None)
        if outside is not None:
            raise InvalidPromptError(
                f"token id {outside} is not in the vocabulary of {vocab_size}", param="prompt"
            )
        _check_known("stop_token_ids", params.stop_token_ids, vocab_size)
        _check_known("logit_bias", [i for i, _ in params.logit_bias], vocab_size)
        if priority and not self.has_priorities:
            raise InvalidRequestError(
                f"priority: {self.phase.slug} serves requests as they arrive; send 0, or leave it out",
                param="priority",
            )
        ids = params.allowed_token_ids
        allowed = self._allowed_tokens(
            vocab_size, None if ids is None else tuple(ids), tuple(params.bad_words)
        )
        if matcher is None and params.grammar is not None:
            matcher = self.new_matcher(params.grammar)
        return Request(
            request_id=request_id if request_id is not None else f"request-{next(self._ids)}",
            prompt_token_ids=token_ids,
            params=params,
            eos_token_ids=self.model.config.eos_token_ids,
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
        """Return the token ids of a prompt's text. Any thread may call this.

        Raises:
            InvalidRequestError: the text is so long that prompt and `new_tokens` exceed the limit in any case.
                Nothing was tokenized.
        """
        self._check_length(self.tokenizer.min_tokens(text), new_tokens, exact=False)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens) if text else []

    @property
    def max_request_tokens(self) -> int:
        """The most tokens of one request, prompt and new ones, that `max_seq_len` and the KV memory allow."""
        return self.max_seq_len if self.pool_limit is None else min(self.max_seq_len, self.pool_limit)

    def _check_length(self, prompt_tokens: int, new_tokens: int, *, exact: bool = True) -> None:
        """Raise InvalidRequestError if a request is too long. Unless `exact`, `prompt_tokens` is a lower bound."""
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


def _check_known(param: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raise InvalidRequestError if the parameter `param` has a token id outside the vocabulary."""
    beyond = next((i for i in token_ids if not 0 <= i < vocab_size), None)
    if beyond is not None:
        raise InvalidRequestError(
            f"{param}: token id {beyond} is not in the vocabulary of {vocab_size}", param=param
        )


def _allowed_tokens(
    tokenizer: Tokenizer, vocab_size: int, token_ids: tuple[int, ...] | None, bad_words: tuple[str, ...]
) -> AllowedTokens | None:
    """Return the tokens that a request's `allowed_token_ids` and `bad_words` allow; None if it has neither.

    Raises:
        InvalidRequestError: a token id is not in the vocabulary, or no token is allowed.
    """
    _check_known("allowed_token_ids", token_ids or (), vocab_size)
    allowed = AllowedTokens.of(tokenizer, token_ids, bad_words)
    if allowed is not None and allowed.is_empty:
        raise InvalidRequestError("bad_words: they forbid every allowed token", param="bad_words")
    return allowed
