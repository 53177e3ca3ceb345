"""The protocol of workers: one JSON object a line, orders on standard input, answers on standard output.

```text
{"folder": "...", "threads": 2, ...}                  once, at the start
                                                      {"ready": "Library 1.2.3"}
{"prompts": [[1, 2, 3], ...], "new_tokens": 40}
                                                      {"prefill_s": 0.6, "decode_s": 0.02, "first_tokens": [7]}
```

If anything goes wrong, the worker answers `{"error": "..."}` and ends. It also ends when its input ends. Libraries
may print: their standard output is redirected to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Options(NamedTuple):
    """Options that a worker is started with.

    Attributes:
        model: the model's name, such as `dummy:llama-60m`.
        folder: the folder or file of the model's weights, in the format that the library reads.
        dtype: number type of the computation and of keys and values, such as `bfloat16`.
        max_seq_len: tokens of the longest sequence.
        max_sequences: the largest number of sequences computed together.
        kv_tokens, kv_bytes: the size of KV memory, in tokens and in bytes.
        threads: the number of threads that compute.
        max_pass_tokens: most prompt tokens in a pass; 0: the library's default.
        phase: the phase that the worker `ours` runs.
        quantize: `int8`, or `none`. Only the worker `ours` reads it. For the others, the weights in `folder` were
            quantized in advance.
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
    quantize: str = "none"


class Timing(NamedTuple):
    """The times of one batch, from its prompts to its last tokens.

    Attributes:
        prefill_s: seconds until every sequence had its first token.
        decode_s: mean seconds of the steps that gave every sequence a token; None if there was no such step.
        first_tokens: the first token of each sequence, in order.
    """

    prefill_s: float
    decode_s: float | None
    first_tokens: list[int]


class Worker(ABC):
    """A library with the weights loaded.

    Attributes:
        name: name and version of the library.
    """

    name: str

    @abstractmethod
    def measure(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Timing:
        """Generate `new_tokens` tokens greedily for each prompt, all prompts at once. Returns the times."""


class SteppingWorker(Worker):
    """A library that batches continuously: requests come and go between steps."""

    @abstractmethod
    def add(self, job: int, prompt: Sequence[int], max_tokens: int) -> None:
        """Queue a request. `job` is its number, which `step` returns with its tokens."""

    @abstractmethod
    def step(self) -> Iterable[tuple[int, int]]:
        """Compute one step. Returns (job, token id) for each token that the step generated."""

    def measure(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Timing:
        first: dict[int, int] = {}
        steps: list[float] = []  # seconds of steps without prompts in which every sequence got a token
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


Convert = Callable[[Path, Path, str], None]  # source, target, `quantize`


def main(make: Callable[[Options], Worker], convert: Convert | None = None) -> None:
    """Run a worker. With the command line `convert FROM TO QUANTIZE`, it converts weights and ends. Without
    arguments, it reads orders from standard input.

    Args:
        make: builds the worker from its options.
        convert: converts a Hugging Face folder to the library's format; None: the library needs no conversion.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    if convert is not None and sys.argv[1:2] == ["convert"]:
        source, target, quantize = sys.argv[2:]
        convert(Path(source), Path(target), quantize)
        return
    try:
        worker = make(Options(**json.loads(sys.stdin.readline())))
        answer({"ready": worker.name})
        for order in sys.stdin:
            answer(worker.measure(**json.loads(order))._asdict())
    except Exception as error:
        answer({"error": " ".join(f"{type(error).__name__}: {error}".split())})
        raise
