"""Times passes of llama.cpp on a GGUF file. An environment with `llama-cpp-python` runs this file as a program.

It reads lines from its standard input, `step SEQUENCES` or `prompt TOKENS`, and answers each with the milliseconds
of the pass. In a step, every sequence gets one more token after `CONTEXT` tokens.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import llama_cpp as library

CONTEXT = 128
STEPS = 12


class Passes:
    def __init__(self, model: Any, threads: int, sequences: int, tokens: int) -> None:
        params = library.llama_context_default_params()
        params.n_seq_max, params.n_ctx = sequences, sequences * tokens
        params.n_batch = params.n_ubatch = max(sequences, tokens)
        params.n_threads = params.n_threads_batch = threads
        self.context = library.llama_init_from_model(model, params)
        self.memory = library.llama_get_memory(self.context)
        self.batch = library.llama_batch_init(params.n_batch, 0, 1)

    def compute(self, places: list[tuple[int, int]]) -> float:
        """Compute a token at each (sequence, position). Returns the seconds. Only last tokens have logits."""
        batch = self.batch
        batch.n_tokens = len(places)
        for i, (sequence, position) in enumerate(places):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = 100 + i, position, 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = i + 1 == len(places) or places[i + 1][0] != sequence
        started = time.perf_counter()
        assert library.llama_decode(self.context, batch) == 0
        library.llama_synchronize(self.context)
        return time.perf_counter() - started

    def step(self, sequences: int) -> float:
        library.llama_memory_clear(self.memory, True)
        for sequence in range(sequences):
            self.compute([(sequence, position) for position in range(CONTEXT)])
        found = [
            self.compute([(sequence, CONTEXT + step) for sequence in range(sequences)])
            for step in range(STEPS)
        ]
        return statistics.median(found)

    def prompt(self, tokens: int) -> float:
        library.llama_memory_clear(self.memory, True)
        return self.compute([(0, position) for position in range(tokens)])


def main(file: str, threads: int, sequences: int, tokens: int) -> None:
    library.llama_backend_init()
    params = library.llama_model_default_params()
    model = library.llama_model_load_from_file(file.encode(), params)
    steps = Passes(model, threads, sequences, CONTEXT + STEPS)
    prompts = Passes(model, threads, 1, tokens)
    print("ready", flush=True)
    for line in sys.stdin:
        kind, count = line.split()
        print(1e3 * (steps.step if kind == "step" else prompts.prompt)(int(count)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
