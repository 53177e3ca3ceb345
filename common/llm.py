"""`LLM`: a list of prompts to a list of texts, with any phase's engine and no server."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from common.engine import Engine
from common.phases import find_phase, phase_names
from common.request import FinishReason, Request, SamplingParams


@dataclass(slots=True)
class Completion:
    """One prompt's answer; `error` where there is none."""

    prompt: str | Sequence[int]
    text: str = ""
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0


class LLM:
    """Offline generation with one phase's engine (the latest phase if none is named).

    ```python
    llm = LLM("zoo:llama-tiny", phase="static", dtype="float32")
    for completion in llm.generate(["Once upon a time"], SamplingParams(temperature=0)):
        print(completion.text)
    ```

    Further keywords are options of the phase's `Config`.

    Raises:
        StartupError: the model cannot be loaded, or an option does not fit it.
    """

    def __init__(self, model: str, *, phase: str | None = None, **options: Any) -> None:
        package = find_phase(phase if phase is not None else phase_names()[-1])
        self.engine: Engine = package.build_engine(package.Config(model=model, **options))

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Complete every prompt: the answers, in the prompts' order.

        Args:
            prompts: texts or token ids, as many as you like: they queue here, not in the engine.
            params: for all, or one each; the defaults if None.
            progress: draw a bar on a terminal.

        Raises:
            InvalidRequestError: a prompt is empty or too long; nothing has run then.
        """
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} params for {len(prompts)} prompts")
        completions = [Completion(prompt) for prompt in prompts]
        requests = [
            self.engine.create_request(prompt, each) for prompt, each in zip(prompts, params, strict=True)
        ]
        try:
            self._run(requests, completions, progress=progress)
        finally:  # an interrupted call leaves nothing behind that the next one would hear of
            self.engine.abort_all(RuntimeError("generation was interrupted"))
        return completions

    def _run(self, requests: Sequence[Request], completions: Sequence[Completion], *, progress: bool) -> None:
        by_id = dict(zip((request.request_id for request in requests), completions, strict=True))
        columns = (TextColumn("completions"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, disable=not progress, transient=True) as bar:
            task = bar.add_task("", total=len(requests))
            pending = deque(requests)
            while pending or self.engine.has_work:
                self._feed(pending)
                self._wait()
                for output in self.engine.step():
                    completion = by_id[output.request_id]
                    completion.text += output.text_delta
                    if output.finished:
                        completion.finish_reason, completion.error = output.finish_reason, output.error
                        completion.prompt_tokens = output.prompt_tokens
                        completion.completion_tokens = output.completion_tokens
                        bar.advance(task)

    def _feed(self, pending: deque[Request]) -> None:
        while pending and self.engine.add_request(pending[0]):
            pending.popleft()

    def _wait(self) -> None:
        """Sleep until the engine has something to do (a static batch waits a moment to fill)."""
        wake = self.engine.next_wake()
        if wake is not None:
            time.sleep(max(0.0, wake - self.engine.clock()))
