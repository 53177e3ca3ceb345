"""Worker for `generate` of `transformers`, which computes a whole batch in one call: it has no steps to call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from benchmarks.peers.workers.protocol import Options, Timing, Worker, main


class _Clock:
    """A streamer that notes the times at which `generate` hands out tokens: first all prompts, then in each step
    one token of every sequence."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.first_tokens: list[int] = []

    def put(self, values: torch.Tensor) -> None:
        self.times_s.append(time.perf_counter())
        if len(self.times_s) == 2:
            self.first_tokens = values.reshape(-1).tolist()

    def end(self) -> None:
        """Do nothing. `generate` calls this after the last step's tokens."""


class Transformers(Worker):
    def __init__(self, options: Options) -> None:
        torch.set_num_threads(options.threads)
        load: Any = transformers.AutoModelForCausalLM  # transformers leaves it untyped
        self._model = load.from_pretrained(options.folder, dtype=getattr(torch, options.dtype)).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0
        self.name = f"transformers {transformers.__version__}"

    def measure(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Timing:
        ids = torch.tensor(prompts)
        clock = _Clock()
        started_s = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=False,
                streamer=clock,
            )
        _, first_s, *_ = clock.times_s
        steps = len(clock.times_s) - 2
        decode_s = (clock.times_s[-1] - first_s) / steps if steps else None
        return Timing(first_s - started_s, decode_s, clock.first_tokens)


if __name__ == "__main__":
    main(Transformers)
