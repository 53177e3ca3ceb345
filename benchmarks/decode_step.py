"""One decode step through our engine against one of `transformers`' `generate`, on the same weights, in one run.

`python -m benchmarks.decode_step [--model dummy:llama-135m] [--batch 1 16] [--repeats 5]`

A step's time is the slope between a short and a long generation, so prompt passes and set-up cancel. The two take
turns, so that a machine that slows down slows both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.results import LOCAL
from benchmarks.tables import Cell, MeasuredTable
from common.models.layers import CausalLM
from common.models.registry import load_model, open_checkpoint
from common.phases import find_phase
from common.request import SamplingParams
from common.text import Tokenizer
from common.zoo.presets import PRESETS

PROMPT_TOKENS = 128
SHORT, LONG = 8, 40  # new tokens


def transformers_twin(model: CausalLM, preset: str) -> Any:
    """The same weights in `transformers`' own model class."""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = dict(PRESETS[preset])
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    build: Any = AutoModelForCausalLM.from_config  # transformers leaves it untyped
    twin = build(config, dtype=model.dtype).eval()
    held = {h.name: h.parameter.data[h.row : h.row + h.rows] for h in model.held_tensors()}
    twin.load_state_dict(held, strict=False)
    twin.tie_weights()
    twin.generation_config.eos_token_id = None
    twin.generation_config.pad_token_id = 0
    return twin


def prompts(batch: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    ids: list[list[int]] = torch.randint(vocab_size, (batch, PROMPT_TOKENS), generator=generator).tolist()
    return ids


def run_ours(
    phase: str, model: CausalLM, tokenizer: Tokenizer, batch: int, new_tokens: int
) -> list[list[int]]:
    package = find_phase(phase)
    config = package.Config(max_batch_size=batch, max_seq_len=PROMPT_TOKENS + LONG)
    engine = package.build_engine(config, model=model, tokenizer=tokenizer)
    params = SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True)
    requests = [engine.create_request(prompt, params) for prompt in prompts(batch, model.config.vocab_size)]
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        engine.step()
    return [request.token_ids for request in requests]


def run_theirs(twin: Any, batch: int, new_tokens: int) -> list[list[int]]:
    ids = torch.tensor(prompts(batch, twin.config.vocab_size))
    mask = torch.ones_like(ids)
    with torch.inference_mode():
        out = twin.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
    tokens: list[list[int]] = out.tolist()
    return tokens


def step_time_s(run: Callable[[int], object]) -> float:
    """Seconds of one decode step."""
    times = []
    for new_tokens in (SHORT, LONG):
        started = time.perf_counter()
        run(new_tokens)
        times.append(time.perf_counter() - started)
    return (times[1] - times[0]) / (LONG - SHORT)


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--model", default="dummy:llama-135m", help="a dummy preset")
    options.add_argument("--phase", default="phase5_continuous")
    options.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    options.add_argument("--out", type=Path, default=LOCAL, help=f"folder for results ({LOCAL})")
    return options


def main() -> None:
    arguments = parser().parse_args()
    checkpoint = open_checkpoint(arguments.model)
    model = load_model(
        checkpoint,
        device=torch.device("cpu"),
        dtype=getattr(torch, arguments.dtype),
        max_positions=PROMPT_TOKENS + LONG,
    )
    twin = transformers_twin(model, arguments.model.removeprefix("dummy:"))
    tokenizer = checkpoint.tokenizer()

    rows: list[list[Cell]] = []
    for batch in arguments.batch:

        def ours(new: int, batch: int = batch) -> list[list[int]]:
            return run_ours(arguments.phase, model, tokenizer, batch, new)

        def theirs(new: int, batch: int = batch) -> list[list[int]]:
            return run_theirs(twin, batch, new)

        ours(SHORT), theirs(SHORT)  # warm
        pairs = [(step_time_s(ours), step_time_s(theirs)) for _ in range(arguments.repeats)]
        rows.append(
            [
                batch,
                statistics.median(a for a, _ in pairs) * 1e3,
                statistics.median(b for _, b in pairs) * 1e3,
                statistics.median(a / b for a, b in pairs),
            ]
        )
    table = MeasuredTable(
        name="decode_step",
        title="one decode step",
        setup={
            "model": f"{arguments.model} in {arguments.dtype}",
            "after prompts of": f"{PROMPT_TOKENS} tokens",
            "median of": f"{arguments.repeats} pairs",
            "threads": str(torch.get_num_threads()),
        },
        columns=["batch", f"{arguments.phase}, ms", "transformers, ms", "ratio"],
        rows=rows,
    )
    console = Console()
    table.print(console)
    console.print(f"written to {table.save(arguments.out)}")


if __name__ == "__main__":
    main()
