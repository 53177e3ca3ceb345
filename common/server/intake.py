"""A request to the engine's own: its prompts tokenized, its choices submitted.

```text
body under 2 MB ─> checked ─> places in the queue ─> tokenized (threads) ─> submitted
bodies             schemas    503                    400, 422
400, 408, 413      400, 422
```
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from common.engine import Engine
from common.errors import InvalidGrammarError, InvalidRequestError
from common.request import Request as EngineRequest
from common.server.schemas.generation import GenerationRequest
from common.server.schemas.tokens import DetokenizeRequest, TokenizeRequest
from common.worker import EngineWorker, RequestStream

#: Requests that are tokenized at the same time. With one, a prompt of two megabytes would hold up every short one
#: for a second; with more, many such prompts would take the cores that the engine computes on.
TOKENIZING_THREADS = 2

#: Requests whose grammars are compiled at the same time: a slow one holds up its like alone.
COMPILING_THREADS = 1


class Intake:
    """Hands checked requests to an engine."""

    def __init__(self, engine: Engine, worker: EngineWorker) -> None:
        self._engine = engine
        self._worker = worker
        self._tokenizing = ThreadPoolExecutor(TOKENIZING_THREADS, thread_name_prefix="tokenizing")
        self._compiling = ThreadPoolExecutor(COMPILING_THREADS, thread_name_prefix="compiling")

    async def submit(self, wanted: GenerationRequest, answer_id: str) -> list[RequestStream]:
        """Hand every choice to the engine, or none: their streams, by index.

        Places in the queue are held while the request waits for its turn to be tokenized, and given back if this is
        cancelled.

        Raises:
            QueueFullError, ShuttingDownError, EngineDeadError: nothing was tokenized.
            InvalidRequestError: nothing was submitted.
        """
        choices = wanted.num_prompts * wanted.choices_per_prompt
        with self._worker.hold_places(choices) as places:
            loop = asyncio.get_running_loop()
            threads = self._compiling if wanted.constrained else self._tokenizing
            making = loop.run_in_executor(threads, self._make_requests, wanted, answer_id)
            return places.submit(await making)

    async def tokenize(self, wanted: TokenizeRequest) -> tuple[list[int], list[str] | None]:
        """Token ids, and how the tokenizer spells them if that is asked for.

        Raises:
            InvalidRequestError: the model's chat template does not take what is to be tokenized.
        """
        tokenizer = self._engine.tokenizer

        def work() -> tuple[list[int], list[str] | None]:
            text = wanted.text(tokenizer.chat_template)
            tokens = tokenizer.encode(text, add_special_tokens=wanted.adds_special_tokens)
            return tokens, [tokenizer.spelled(i) for i in tokens] if wanted.return_token_strs else None

        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work)

    async def detokenize(self, wanted: DetokenizeRequest) -> str:
        """The text of token ids, special tokens included."""
        decode = functools.partial(self._engine.tokenizer.decode, wanted.tokens, skip_special_tokens=False)
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, decode)

    def _make_requests(self, wanted: GenerationRequest, answer_id: str) -> list[EngineRequest]:
        requests: list[EngineRequest] = []
        try:
            for prompt in wanted.prompts(self._engine.tokenizer.chat_template):
                token_ids = self._tokenize(prompt, wanted)
                max_new_tokens = self._max_new_tokens(wanted, len(token_ids))
                requests += [
                    self._engine.create_request(
                        token_ids,
                        wanted.sampling_params(choice, max_new_tokens),
                        f"{answer_id}-{len(requests) + choice}",
                        cache_salt=wanted.cache_salt or "",
                    )
                    for choice in range(wanted.choices_per_prompt)
                ]
        except InvalidGrammarError as error:
            assert wanted.named_grammar is not None
            name, _ = wanted.named_grammar
            raise InvalidGrammarError(f"{name}: {error}", param=name) from None
        except InvalidRequestError as error:
            error.param = error.param and wanted.field_of(error.param)
            raise
        return requests

    def _tokenize(self, prompt: str | Sequence[int], wanted: GenerationRequest) -> Sequence[int]:
        if not isinstance(prompt, str):
            return wanted.truncated(prompt)
        if wanted.truncate_prompt_tokens is not None:  # however long it is, what is taken of it may fit
            tokenizer = self._engine.tokenizer
            return wanted.truncated(tokenizer.encode(prompt, add_special_tokens=wanted.adds_special_tokens))
        at_least = 1 if wanted.max_new_tokens is None else wanted.max_new_tokens
        return self._engine.tokenize(prompt, at_least, add_special_tokens=wanted.adds_special_tokens)

    def _max_new_tokens(self, wanted: GenerationRequest, prompt_tokens: int) -> int:
        """The longest answer: what is wanted, or what fits behind a prompt of so many tokens."""
        if wanted.max_new_tokens is not None:
            return wanted.max_new_tokens
        room = self._engine.max_request_tokens - prompt_tokens
        if 0 < room < (wanted.min_tokens or 0):
            raise InvalidRequestError(
                f"min_tokens: {wanted.min_tokens} do not fit behind a prompt of {prompt_tokens} tokens",
                param="min_tokens",
            )
        # A prompt that leaves no room is refused for its length, and its parameters are to make sense until then.
        return max(room, wanted.min_tokens or 1)
