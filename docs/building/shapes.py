"""The shapes of one forward pass, noted while a pass runs when the site is built."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from common.generate import ContiguousCache
from common.kv import KVShape, KVView, Span
from common.models.config import ModelConfig
from common.models.layers import CausalLM, RotaryTable, TokenBatch
from common.models.registry import load_model, open_checkpoint
from common.request import Request, SamplingParams
from docs.building.memory import config_of

MODEL, LARGE = "zoo:llama-tiny", "Llama 3.2 1B"
HELD = (131, 7, 0)  # columns that A, B and C have before the pass
NEW = (1, 1, 3)  # and those that it computes


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table.

    Attributes:
        code: what is called.
        says: what it does.
        results: the shapes it returns, in the names of `dims`.
        weights: how many numbers it multiplies by, as a product of names; empty: none.
        key: under which the run notes its shapes; `each`: whether every layer does it.
    """

    code: str
    says: str
    results: tuple[str, ...]
    weights: str = ""
    key: str = ""
    each: bool = True


LINES = (
    Line("embed", "a row of the embedding for each token", ("T H",), "V H", "embed", each=False),
    Line("rotary", "cos and sin of each token's position", ("T D/2", "T D/2"), key="rotary", each=False),
    Line(
        "input_layernorm.add_and_norm",
        "what the layer before added, and its norm",
        ("T H", "T H"),
        "H",
        "norm",
    ),
    Line(
        "self_attn.qkv_proj",
        "queries, keys and values in one product",
        ("T Q*D+2*K*D",),
        "Q*D+2*K*D H",
        "qkv",
    ),
    Line("rope", "queries and keys turned by their positions", ("T Q D", "T K D"), key="rope"),
    Line("view.attend", "keys and values stored; every query meets those it sees", ("T Q D",), key="attend"),
    Line("self_attn.o_proj", "heads mixed, back to the stream's width", ("T H",), "H Q*D", "out"),
    Line(
        "post_attention_layernorm.add_and_norm",
        "added to the stream, and its norm",
        ("T H", "T H"),
        "H",
        "norm2",
    ),
    Line(
        "mlp.gate_up_proj",
        "gates and ups in one product, then `silu(gate) * up`",
        ("T F",),
        "2*F H",
        "gate_up",
    ),
    Line("mlp.down_proj", "back to the stream's width", ("T H",), "H F", "down"),
    Line(
        "norm.add_and_norm",
        "of the rows that need logits, and no others",
        ("S H", "S H"),
        "H",
        "last",
        each=False,
    ),
    Line("lm_head", "a score for every token there is", ("S V",), "V H", "head", each=False),
)


@functools.cache
def noted_shapes() -> dict[str, tuple[tuple[int, ...], ...]]:
    """What each line of a pass through a tiny model returned."""
    checkpoint = open_checkpoint(MODEL)
    device = torch.device("cpu")
    model = load_model(checkpoint, device=device, dtype=torch.float32, max_positions=256)
    batch, view = _pass(model)
    found: dict[str, tuple[tuple[int, ...], ...]] = {}

    def noted(key: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            tensors = result if isinstance(result, tuple) else (result,)
            found.setdefault(key, tuple(tuple(tensor.shape) for tensor in tensors))
            return result

        return run

    layer: Any = model.layers[0]
    watched: list[tuple[Any, str, str]] = [
        (model, "embed", "embed"),
        (RotaryTable, "forward", "rotary"),
        (layer.input_layernorm, "add_and_norm", "norm"),
        (layer.self_attn.qkv_proj, "forward", "qkv"),
        (KVView, "attend", "attend"),
        (layer.self_attn.o_proj, "forward", "out"),
        (layer.post_attention_layernorm, "add_and_norm", "norm2"),
        (layer.mlp.gate_up_proj, "forward", "gate_up"),
        (layer.mlp.down_proj, "forward", "down"),
        (model.norm, "add_and_norm", "last"),
        (model.lm_head, "forward", "head"),
    ]
    with ExitStack() as stack:
        for owner, name, key in watched:
            stack.enter_context(patch.object(owner, name, noted(key, getattr(owner, name))))
        rope = "common.models.layers.rope"
        stack.enter_context(patch(rope, noted("rope", layer.self_attn.forward.__globals__["rope"])))
        model(batch, view)
    return found


def _pass(model: CausalLM) -> tuple[TokenBatch, KVView]:
    """A and B decode, C's prompt has three tokens: the pass of the page about the flat forward pass."""
    cache = ContiguousCache(KVShape.of(model.config, model.dtype), model.device, 256, len(HELD))
    for name in "ABC":
        cache.reserve(Request(name, [0], SamplingParams()), 256)
    cache.advance(Span.exact(slot, 0, held) for slot, held in enumerate(HELD))
    spans = [
        Span.exact(slot, held, held + new) for slot, (held, new) in enumerate(zip(HELD, NEW, strict=True))
    ]
    view = cache.view(spans)
    rows = torch.tensor(NEW).cumsum(0) - 1
    return TokenBatch(torch.tensor([812, 44, 17, 5, 90]), view.positions, rows), view


def shapes_table() -> str:
    """Every line of a pass: what comes out, by name and in numbers. A name that is not so fails the build."""
    here, large = dims(open_checkpoint(MODEL).config), dims(config_of(LARGE))
    found = noted_shapes()
    rows = [
        f"| call | result | shape | here | {LARGE} | weights there |",
        "| --- | --- | --- | --- | --- | ---: |",
    ]
    for line in LINES:
        shapes = tuple(tuple(sizes(each, here)) for each in line.results)
        assert found[line.key] == shapes, f"{line.code} returned {found[line.key]}, the page says {shapes}"
        weights = _product(sizes(line.weights, large)) if line.weights else 0
        layers = f"{large['L']} × " if line.each and weights else ""
        rows.append(
            f"| `{line.code}` | {line.says} | {_written(line.results, None)} | {_written(line.results, here)} "
            f"| {_written(line.results, large)} | {f'{layers}{weights:,}' if weights else ''} |"
        )
    return "\n".join(rows) + "\n"


def weights_table() -> str:
    """Where a model's weights are, and what a token costs."""
    rows = [
        "| model | layers | embedding | attention | MLP | head | operations a token |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for model in ("Llama 3.2 1B", "Llama 3.2 3B", "Qwen3 4B", "Gemma 3 1B"):
        config = config_of(model)
        n = dims(config)
        attention = n["L"] * _product(sizes("Q*D+2*K*D H", n)) + n["L"] * _product(sizes("H Q*D", n))
        mlp, embedding = n["L"] * 3 * n["F"] * n["H"], n["V"] * n["H"]
        head = "the embedding" if config.tie_word_embeddings else _millions(embedding)
        operations = 2 * (attention + mlp + embedding)
        rows.append(
            f"| {model} | {n['L']} | {_millions(embedding)} | {_millions(attention)} | {_millions(mlp)} "
            f"| {head} | {operations / 1e9:.1f} billion |"
        )
    return "\n".join(rows) + "\n"


def dims(config: ModelConfig) -> dict[str, int]:
    """The names that shapes are written in."""
    return {
        "T": sum(NEW),
        "S": len(NEW),
        "H": config.hidden_size,
        "Q": config.num_heads,
        "K": config.num_kv_heads,
        "D": config.head_dim,
        "F": config.intermediate_size,
        "V": config.vocab_size,
        "L": config.num_layers,
    }


def sizes(shape: str, names: dict[str, int]) -> list[int]:
    """`T Q*D` in numbers: factors are divided by spaces, terms of sums are joined by `+`."""
    return [
        sum(_product([_value(factor, names) for factor in term.split("*")]) for term in size.split("+"))
        for size in shape.split()
    ]


def _value(factor: str, names: dict[str, int]) -> int:
    name, _, divisor = factor.partition("/")
    return (names[name] if name in names else int(name)) // int(divisor or 1)


def _product(factors: list[int]) -> int:
    result = 1
    for factor in factors:
        result *= factor
    return result


def _written(shapes: tuple[str, ...], names: dict[str, int] | None) -> str:
    """As on a page; equal ones once."""
    each = [
        ", ".join(shape.replace("*", "·").split() if names is None else map(str, sizes(shape, names)))
        for shape in shapes
    ]
    return "<br>".join(f"`[{text}]`" for text in dict.fromkeys(each)) + (
        " twice" if len(set(each)) < len(each) else ""
    )


def _millions(count: int) -> str:
    return f"{count / 1e6:,.0f} million"
