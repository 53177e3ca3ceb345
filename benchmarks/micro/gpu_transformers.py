"""Continuous batching of `transformers`, on random weights of the same shape as ours.

The library notes a time for each token. The rate counts the tokens from the time at which every sequence has
begun to the time at which the first sequence ends. (`gpu_steps` also leaves out a few steps at both ends.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import transformers

from benchmarks.micro import Dtype, say
from benchmarks.micro.on_device import DEVICE, prompts_of
from benchmarks.tables import Cell, MeasuredTable
from common.errors import StartupError
from common.models.presets import PRESETS


def build(preset: str, dtype: str) -> Any:
    """Return a model of transformers with the shape of a preset and random weights.

    Raises:
        StartupError: this version has no continuous batching.
    """
    shape = dict(PRESETS[preset])
    config = transformers.AutoConfig.for_model(shape.pop("model_type"), **shape)
    make: Any = transformers.AutoModelForCausalLM  # transformers leaves it untyped
    with DEVICE:
        model = make.from_config(config, dtype=getattr(torch, dtype)).eval()
    if not hasattr(model, "generate_batch"):
        raise StartupError(f"transformers {transformers.__version__} has no generate_batch")
    return model


def tokens_per_s(model: Any, prompts: list[list[int]], new_tokens: int) -> float:
    """Return the tokens a second at which all prompts are continued together.

    Raises:
        ValueError: an answer is missing or has fewer than `new_tokens` tokens.
    """
    make: Any = transformers.GenerationConfig  # transformers leaves it untyped
    settings = make(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    memory = {}
    if DEVICE.type == "cpu":  # without a limit, transformers reserves nearly all memory
        memory["continuous_batching_config"] = transformers.ContinuousBatchingConfig(num_blocks=16)
    answers = model.generate_batch(
        inputs=prompts, generation_config=settings, record_timestamps=True, **memory
    )
    times: list[list[float]] = [answer.timestamps for answer in answers.values()]
    if len(times) < len(prompts) or any(len(each) < new_tokens for each in times):
        raise ValueError(f"{len(times)} of {len(prompts)} prompts were answered, some not in full")
    began_s, ended_s = max(each[0] for each in times), min(each[-1] for each in times)
    return sum(began_s < at <= ended_s for each in times for at in each) / (ended_s - began_s)


def batching(
    model: str = "dummy:llama-3.2-1b",
    sequences: tuple[int, ...] = (1, 8, 64, 256),
    prompt_tokens: int = 32,
    new_tokens: int = 32,
    dtype: Dtype = "bfloat16",
) -> Iterator[MeasuredTable]:
    """Time continuous batching of transformers.

    Args:
        sequences: numbers of sequences
    """
    preset = model.removeprefix("dummy:")
    built = build(preset, dtype)
    rows: list[list[Cell]] = []
    for count in sequences:
        say(f"{count} sequences")
        prompts = prompts_of(count, prompt_tokens, PRESETS[preset]["vocab_size"])
        tokens_per_s(built, prompts, new_tokens)  # the first call compiles
        rows.append([count, tokens_per_s(built, prompts, new_tokens)])
        yield MeasuredTable(
            name=f"gpu_transformers_{preset}",
            title=f"transformers {transformers.__version__}, continuous batching of {model}",
            setup={"model": f"{model} in {dtype}", "context": f"{prompt_tokens} tokens"},
            columns=["sequences", "tokens / s"],
            rows=rows,
        )
