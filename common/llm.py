"""`LLM`: generates texts for a list of prompts with any phase's engine, without a server."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, cast

from pydantic import ValidationError
from rich import get_console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from common.engine.config import EngineConfig
from common.engine.engine import Engine
from common.errors import InvalidRequestError, StartupError
from common.request import FinishReason, Request, SamplingParams, StepOutput, TokenLogprobs
from common.startup.phases import PhasePackage, find_phase, phase_names
from common.text.chat_template import BREAK
from common.text.conversation import Message

Prompt = str | Sequence[int]
Conversation = Sequence[Message]


@dataclass(slots=True)
class Completion:
    """The answer to one prompt. If the request failed, `error` says why, and the answer may be incomplete.

    Attributes:
        token_ids: the generated tokens, including an EOS or stop token that ended the answer.
        logprobs: one entry for each of `token_ids`; None unless `SamplingParams.logprobs` asked for them.
        prompt_logprobs: one entry for each token of the prompt but the first; None unless
            `SamplingParams.prompt_logprobs` asked for them. None also if the request ended before its first token.
    """

    prompt: Prompt
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, output: StepOutput) -> None:
        """Add an output of the engine: a token with its text, or the end of the answer, or both."""
        self.text += output.text_delta
        if output.token_id is not None:
            self.token_ids.append(output.token_id)
        if self.logprobs is not None and output.logprobs is not None:
            self.logprobs.append(output.logprobs)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = list(output.prompt_logprobs)
        if output.finished:
            self.finish_reason, self.error = output.finish_reason, output.error
            self.prompt_tokens, self.completion_tokens = output.prompt_tokens, output.completion_tokens


class LLM:
    """Generates texts with one phase's engine, without a server. If no phase is named, the last phase is used.

    ```python
    llm = LLM("zoo:llama-tiny", phase="static", dtype="float32")
    for completion in llm.generate(["Once upon a time"], SamplingParams(temperature=0)):
        print(completion.text)
    ```

    Further keywords are options of the phase's `Config`.

    Any thread may call `generate`. A second caller blocks until the first has its answers. But build and use an LLM
    in one thread: each thread that computes has its own pool of workers for torch's operators (libgomp), and two
    pools on the same cores slow each other down.

    A process that was forked while no answer was computed can use its copy of an LLM of phase 9 or later. With one
    of an earlier phase it may wait for ever, if more than one thread computes: build that in the new process.

    Raises:
        StartupError: there is no such phase or option, a value is invalid, or the model cannot be loaded.
    """

    def __init__(self, model: str, *, phase: int | str | None = None, **options: Any) -> None:
        package = find_phase(phase if phase is not None else phase_names()[-1])
        self.engine: Engine = package.build_engine(_configure(package, {"model": model, **options}))
        self._turn = threading.Lock()  # an engine is not thread-safe: one call of `generate` at a time

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Complete every prompt. Returns the answers in the order of the prompts.

        If a request fails after its start, its answer has the `error`, and the others go on.

        Args:
            prompts: texts or token ids, any number of prompts: those that find the engine's queue full wait here.
                One text, or one list of token ids, is one prompt. An array or a tensor counts as a list.
            params: sampling parameters for all prompts, or one for each prompt; None: `default_params`.
            progress: draw a progress bar if stdout is a terminal.

        Raises:
            InvalidRequestError: a prompt or its parameters cannot be served (see `RequestMaker.create`). For
                example, the prompt is empty or too long. Nothing has run.
            ValueError: the numbers of params and of prompts differ.
            RuntimeError: the engine is paused, or has ended (`EngineDeadError`).
        """
        prompts = _listed(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.default_params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} params for {len(prompts)} prompts")
        pairs = list(zip(prompts, params, strict=True))
        completions = [
            Completion(prompt, logprobs=None if each.logprobs is None else []) for prompt, each in pairs
        ]
        requests = [self.engine.maker.create(prompt, each) for prompt, each in pairs]
        with self._turn:
            self._clear()  # a second Ctrl-C may have interrupted the last call's `_clear` below
            try:
                self._run(requests, completions, progress=progress)
            finally:
                self._clear()
        return completions

    @property
    def default_params(self) -> SamplingParams:
        """The sampling parameters of calls without `params`: those that the model suggests, unless the option
        `generation_config` is `none`."""
        return self.engine.maker.facts.default_params

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        continue_final_message: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """Answer every conversation. Returns the answers in the order of the conversations.

        Args:
            messages: conversations, or a single one. Each is a list of messages with a `role` and a `content`,
                both text. The model's chat template turns a conversation into a text, which becomes the `prompt`
                of the answer.
            params, progress: as for `generate`.
            continue_final_message: the model continues the last message instead of answering it. Default: if it
                is the assistant's.
            chat_template_kwargs: variables for the template, such as `enable_thinking`.

        Raises:
            InvalidRequestError: the model has no chat template, a conversation is empty or not of text, the
                template refuses a conversation, or as `generate`. Nothing has run.
            ValueError, RuntimeError: as `generate`.
        """
        tokenizer = self.engine.maker.tokenizer
        if tokenizer.chat_template is None:
            raise InvalidRequestError(
                "this model has no chat template, so nothing says how it reads a conversation; "
                "generate() continues text",
                param="messages",
            )
        texts = [
            tokenizer.chat_template.render(
                _checked(conversation),
                continue_final_message=continue_final_message,
                variables=chat_template_kwargs,
            )
            for conversation in _conversations(messages)
        ]
        tokenize = self.engine.maker.tokenize
        prompts = [
            tokenize(str(_as_prompt(text)), add_special_tokens=False) for text in texts
        ]  # the template has written them
        completions = self.generate(prompts, params, progress=progress)
        for completion, text in zip(completions, texts, strict=True):
            completion.prompt = text.replace(BREAK, "")
        return completions

    def _clear(self) -> None:
        """Fail all requests in the engine. An interrupted call leaves some, and the next call must not get their
        outputs."""
        self.engine.abort_all(RuntimeError("generation was interrupted"))

    def _run(self, requests: Sequence[Request], completions: Sequence[Completion], *, progress: bool) -> None:
        by_id = dict(zip((request.request_id for request in requests), completions, strict=True))
        columns = (TextColumn("completions"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        drawn = progress and get_console().is_terminal  # elsewhere the bar would leave an empty line
        with Progress(*columns, disable=not drawn, transient=True) as bar:
            task = bar.add_task("", total=len(requests))
            pending = deque(requests)
            while pending or self.engine.has_work:
                if self.engine.paused:
                    raise RuntimeError("the engine is paused: call llm.engine.resume() first")
                while pending and self.engine.add_request(pending[0]):
                    pending.popleft()
                self._wait()
                for output in self.engine.step():
                    by_id[output.request_id].add(output)
                    if output.finished:
                        bar.advance(task)

    def _wait(self) -> None:
        """Sleep until the engine's next step is due: in phase 4, a batch waits a moment to fill."""
        wake = self.engine.next_wake()
        if wake is not None:
            time.sleep(max(0.0, wake - self.engine.clock()))


def _listed(prompts: Any) -> list[Prompt]:
    """Return prompts as a list, a single prompt as a list of one, and token ids of an array or a tensor as a list.

    Raises:
        InvalidRequestError: a prompt is neither a text nor token ids.
    """
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        return [_as_prompt(prompts)]
    prompts = prompts if isinstance(prompts, Sequence) else list(prompts)
    single = len(prompts) > 0 and isinstance(prompts[0], Integral)
    return [_as_prompt(each) for each in ([prompts] if single else prompts)]


def _as_prompt(prompt: Any) -> Prompt:
    """Return a text as it is, and token ids as integers of Python. InvalidRequestError: `prompt` is neither."""
    prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"the prompt is no text: {error}") from None
        return prompt
    are_ids = isinstance(prompt, Sequence) and not isinstance(prompt, bytes)
    if not are_ids or any(isinstance(each, bool) or not isinstance(each, Integral) for each in prompt):
        raise InvalidRequestError(
            f"a prompt is a text or a list of token ids, not {type(prompt).__name__}: {prompt!r:.80}"
        )
    return prompt if all(type(each) is int for each in prompt) else [int(each) for each in prompt]


def _conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """Return conversations as a list, a single conversation as a list of one."""
    single = len(messages) > 0 and isinstance(messages[0], Mapping)
    return cast(list[Conversation], [messages] if single else list(messages))


def _checked(conversation: Conversation) -> Conversation:
    """Check a conversation and return it. InvalidRequestError: it is empty, or a role or content is not a text."""
    if not conversation:
        raise InvalidRequestError("a conversation needs a message", param="messages")
    for number, message in enumerate(conversation):
        if not isinstance(message, Mapping):
            kind = type(message).__name__
            raise InvalidRequestError(f"messages[{number}] must be a message, not {kind}", param="messages")
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                raise InvalidRequestError(f"messages[{number}]: its {name} must be a text", param="messages")
    return conversation


def _configure(package: PhasePackage, options: dict[str, Any]) -> EngineConfig:
    """Return a phase's options, validated. StartupError: one line about the first option that is wrong."""
    try:
        return package.Config(**options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:  # options that contradict each other: the message names them
        raise StartupError(message)
    name = first["loc"][0]
    if first["type"] == "extra_forbidden":
        raise StartupError(
            f"{package.PHASE.slug} has no option {name}; it has {', '.join(package.Config.model_fields)}"
        )
    raise StartupError(f"{name}: {message}, not {first['input']!r}")
