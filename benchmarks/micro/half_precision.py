"""Real models in bfloat16 beside float32: answers, perplexity, and the distribution of the next token."""

from __future__ import annotations

import copy
import functools
import math
import statistics
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.chats import read
from benchmarks.micro import say
from benchmarks.micro.int8 import compare, texts_of
from benchmarks.micro.passes import load_as_served
from benchmarks.tables import Cell, MeasuredTable
from common.engine.reference import generate
from common.models.layers import CausalLM, RMSNorm
from common.models.registry import open_checkpoint
from common.request import Request, SamplingParams
from common.text.tokenizer import Tokenizer


def twin(model: CausalLM) -> CausalLM:
    """Copy a model without its weights, which both models use."""
    packed = [layer.packed for layer in model.linear_layers() if layer.packed is not None]
    return copy.deepcopy(model, {id(each): each for each in (*model.parameters(), *model.buffers(), *packed)})


def add_and_round(norm: RMSNorm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `RMSNorm.add_and_norm`, but round the sum to the type of `x`."""
    total = (x + residual).to(x.dtype)
    return norm(total), total.float()


def ways(name: str, positions: int) -> dict[str, CausalLM]:
    """Load a model in float32 and in bfloat16. Returns them, and the bfloat16 model with more roundings."""
    half = load_as_served(name, torch.bfloat16, positions)
    rounded_logits, rounded = twin(half), twin(half)
    for model in (rounded_logits, rounded):
        model.lm_head.wide = False
    for each in rounded.modules():
        if isinstance(each, RMSNorm):
            setattr(each, "add_and_norm", functools.partial(add_and_round, each))  # noqa: B010 - it is a method
    return {
        "float32": load_as_served(name, torch.float32, positions),
        "bfloat16": half,
        "bfloat16, logits rounded": rounded_logits,
        "bfloat16, logits and residual stream rounded": rounded,
    }


def prompt_of(tokenizer: Tokenizer, question: str) -> list[int]:
    """Return a question's token ids. A model without a chat template is asked to continue it."""
    if tokenizer.chat_template is None:
        return tokenizer.encode(f"Question: {question}\nAnswer:")
    text = tokenizer.chat_template.render([{"role": "user", "content": question}])
    return tokenizer.encode(text, add_special_tokens=False)


def answers(model: CausalLM, prompts: list[list[int]], tokens: int) -> list[list[int | None]]:
    """Return the greedy answers to prompts, of at most `tokens` tokens each."""
    params, ends = SamplingParams(temperature=0.0, max_new_tokens=tokens), model.config.eos_token_ids
    return [
        [output.token_id for output in generate(model, Request("", prompt, params, ends))]
        for prompt in prompts
    ]


def accuracy(
    models: tuple[str, ...] = ("smollm2", "gemma3-270m"),
    tokens: int = 500,
    texts: int = 6,
    questions: int = 20,
    answer: int = 32,
) -> Iterator[MeasuredTable]:
    """Compare real models in bfloat16, with fewer and with more roundings, with the same models in float32.

    Args:
        models: names that `infer fetch` knows, or other models
        tokens: length of each text
        texts: number of texts, from this documentation
        questions: number of questions that are answered greedily
        answer: tokens of an answer, at most
    """
    for name in models:
        tokenizer = open_checkpoint(name).tokenizer()
        prompts = [prompt_of(tokenizer, each) for each in read("questions.txt").splitlines()[:questions]]
        loaded = ways(name, max(tokens, max(map(len, prompts)) + answer))
        compared = [compare(list(loaded.values()), ids) for ids in texts_of(name, tokens, texts)]
        expected = answers(loaded["float32"], prompts, answer)
        rows: list[list[Cell]] = []
        for place, (way, model) in enumerate(loaded.items()):
            own, whole = [found[place] for found in compared], [found[0] for found in compared]
            given = expected if place == 0 else answers(model, prompts, answer)
            equal = statistics.mean(a == b for a, b in zip(given, expected, strict=True))
            changes = [100 * (a.perplexity / b.perplexity - 1) for a, b in zip(own, whole, strict=True)]
            divergences = [statistics.mean(each.divergences) for each in own]
            rows.append(
                [
                    way,
                    math.exp(statistics.mean(math.log(each.perplexity) for each in own)),
                    *_mean_and_error(changes),
                    *(1000 * each for each in _mean_and_error(divergences)),
                    100 * statistics.mean(each.same for each in own),
                    round(equal * len(prompts)),
                    len(prompts) * (equal * (1 - equal) / len(prompts)) ** 0.5,
                ]
            )
            say(f"{name}, {way}: {rows[-1]}")
        yield MeasuredTable(
            name=f"half_precision_{name.split(':')[-1]}",
            title=f"{name}: rounding to bfloat16, beside float32",
            setup={
                "texts": f"{len(compared)} of {tokens} tokens, from this site's pages",
                "answers": f"{len(prompts)}, greedy, of at most {answer} tokens",
            },
            columns=[
                *("computed in", "perplexity", "change, %", "its standard error, %"),
                *("KL divergence, 1/1000 nats", "its standard error, 1/1000 nats"),
                *("same most probable token, %", "equal answers", "their standard error"),
            ],
            rows=rows,
        )


def _mean_and_error(values: list[float]) -> tuple[float, float]:
    """Return the mean of at least two values, and its standard error."""
    return statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5
