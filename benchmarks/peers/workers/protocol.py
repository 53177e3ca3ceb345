"""The protocol of workers: one JSON object a line, orders on standard input, answers on standard output.

```text
{"folder": "...", "threads": 2, ...}                  once, at the start
                                                      {"ready": "Library 1.2.3"}
{"measure": [[1, 2, 3], ...], "new_tokens": 40}
                                                      {"prefill_s": 0.6, "decode_s": 0.02, "first_tokens": [7]}
{"add": 5, "prompt": [1, 2, 3], "max_tokens": 2}
                                                      {"tokens": [[5, 17]]}
                                                      {"tokens": [[5, 4]]}
```

Anything wrong is `{"error": "...", "id": 5}`; without an id the worker has ended. It ends, too, with its input.
Libraries print what they like: their standard output is turned into standard error.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO


class Options(NamedTuple):
    """Options that a worker is started with.

    Attributes:
        model: its name, such as `dummy:llama-60m`.
        folder: its weights, in the form that the library reads.
        dtype: what to compute in and to keep keys and values in, such as `bfloat16`.
        max_seq_len: tokens of the longest sequence.
        max_sequences: computed together.
        kv_tokens, kv_bytes: KV memory, in tokens and what they take.
        threads: that compute.
        max_pass_tokens: of prompts that are computed at once; 0: as the library's default is.
        phase: for ours.
    """

    model: str
    folder: str
    dtype: str
    max_seq_len: int
    max_sequences: int
    kv_tokens: int
    kv_bytes: int
    threads: int
    max_pass_tokens: int = 0
    phase: str = ""


class Timing(NamedTuple):
    """The times of one batch, from its prompts to its last tokens.

    Attributes:
        prefill_s: until every sequence had its first token.
        decode_s: of a step that brought a token to every sequence, the mean; None where there was no such step.
        first_tokens: of each sequence, in order.
    """

    prefill_s: float
    decode_s: float | None
    first_tokens: list[int]


class Worker(ABC):
    """A library with the weights loaded.

    Attributes:
        name: the library's, with its version.
    """

    name: str

    @abstractmethod
    def measure(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Timing:
        """Generate greedily for all prompts at once, `new_tokens` each."""


class SteppingWorker(Worker):
    """A library that batches continuously: requests come and go between steps."""

    @abstractmethod
    def add(self, job: int, prompt: Sequence[int], max_tokens: int) -> None:
        """Queue a request. ValueError: it cannot be served."""

    @abstractmethod
    def step(self) -> Iterable[tuple[int, int]]:
        """Compute once. Returns jobs and the tokens they got."""

    def measure(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Timing:
        first: dict[int, int] = {}
        steps: list[
            float
        ] = []  # those that brought every sequence a token, and no prompt was computed beside
        prefill_s = 0.0
        left = len(prompts) * new_tokens
        for job, prompt in enumerate(prompts):
            self.add(job, prompt, new_tokens)
        while left:
            all_began = len(first) == len(prompts)
            started_s = time.perf_counter()
            tokens = list(self.step())
            elapsed_s = time.perf_counter() - started_s
            left -= len(tokens)
            if not all_began:
                prefill_s += elapsed_s
            elif len(tokens) == len(prompts):
                steps.append(elapsed_s)
            for job, token in tokens:
                first.setdefault(job, token)
        decode_s = sum(steps) / len(steps) if steps else None
        return Timing(prefill_s, decode_s, [first[job] for job in range(len(prompts))])


def main(make: Callable[[Options], Worker], convert: Callable[[Path, Path], None] | None = None) -> None:
    """Run a worker: `convert FROM TO`, or without arguments orders from standard input."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if convert is not None and sys.argv[1:2] == ["convert"]:
        source, target = sys.argv[2:]
        convert(Path(source), Path(target))
        return
    try:
        worker = make(Options(**json.loads(sys.stdin.readline())))
        _say(answers, {"ready": worker.name})
        _serve(worker, answers)
    except Exception as error:
        _say(answers, _described(error))
        raise


def _serve(worker: Worker, answers: TextIO) -> None:
    """Follow orders until there are no more."""
    orders: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            orders.put(line)
        orders.put("")

    threading.Thread(target=read, name="orders", daemon=True).start()
    left: dict[int, int] = {}  # tokens that each running job still gets
    while True:
        while not left or not orders.empty():
            line = orders.get()
            if not line:
                return
            order = json.loads(line)
            if "measure" in order:
                _say(answers, worker.measure(order["measure"], order["new_tokens"])._asdict())
            else:
                assert isinstance(worker, SteppingWorker), "only a worker with steps takes single requests"
                try:
                    worker.add(order["add"], order["prompt"], order["max_tokens"])
                except ValueError as error:
                    _say(answers, _described(error) | {"id": order["add"]})
                else:
                    left[order["add"]] = order["max_tokens"]
        assert isinstance(worker, SteppingWorker)
        tokens = list(worker.step())
        for job, _ in tokens:
            left[job] -= 1
            if not left[job]:
                del left[job]
        if tokens:
            _say(answers, {"tokens": tokens})


def _say(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _described(error: Exception) -> dict[str, Any]:
    return {"error": " ".join(f"{type(error).__name__}: {error}".split())}
