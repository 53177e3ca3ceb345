"""The model, the sampler and the cache of phases 1 to 3 by hand: a text of two or three words, two numbers a word.

The model has the structure of Llama, with one layer, one head, two numbers a token and a vocabulary of four words.
The functions compute with plain numbers, so that a reader can follow them on paper. A test gives the same weights
to the server's own model, sampler and cache, and compares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Vector = Sequence[float]
Matrix = Sequence[Vector]  # rows are outputs, columns are inputs

WORDS = ("the", "cat", "sat", "down")
TEXT = (0, 1)  # "the cat"

EMBEDDING: Matrix = ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (-1.0, 1.0))
W_Q: Matrix = ((1.0, 1.0), (0.0, 1.0))
W_K: Matrix = ((1.0, 0.0), (0.5, 1.0))
W_V: Matrix = ((1.0, 0.0), (0.0, 2.0))
W_O: Matrix = ((0.5, 0.5), (0.0, 0.5))
W_GATE: Matrix = ((1.0, 1.0),)
W_UP: Matrix = ((0.5, 0.5),)
W_DOWN: Matrix = ((0.5,), (0.0,))
HEAD: Matrix = ((-0.5, 0.0), (0.0, 0.5), (0.5, 2.0), (2.0, 0.0))
EPSILON = 1e-5


# ---------------------------------------------------------------------- the model, on one token


def product(weights: Matrix, x: Vector) -> list[float]:
    return [sum(w * number for w, number in zip(row, x, strict=True)) for row in weights]


def norm(x: Vector) -> list[float]:
    scale = 1 / math.sqrt(sum(number**2 for number in x) / len(x) + EPSILON)
    return [number * scale for number in x]


def turn(pair: Vector, position: int) -> list[float]:
    cos, sin = math.cos(position), math.sin(position)
    return [pair[0] * cos - pair[1] * sin, pair[1] * cos + pair[0] * sin]


def softmax(scores: Vector) -> list[float]:
    powers = [math.exp(score - max(scores)) for score in scores]
    return [power / sum(powers) for power in powers]


def attend(query: Vector, keys: Matrix, values: Matrix) -> tuple[list[float], list[float], list[float]]:
    scores = [sum(q * k for q, k in zip(query, key, strict=True)) / math.sqrt(2) for key in keys]
    weights = softmax(scores)
    mixed = [sum(w * value[i] for w, value in zip(weights, values, strict=True)) for i in (0, 1)]
    return scores, weights, mixed


@dataclass(frozen=True, slots=True)
class Token:
    """All intermediate results of the model for one token."""

    embedded: Vector
    normed: Vector
    query: Vector
    key: Vector
    value: Vector
    turned_query: Vector
    turned_key: Vector
    scores: Vector
    weights: Vector
    mixed: Vector
    after_attention: Vector
    after_mlp: Vector
    logits: Vector


def compute(token_id: int, cache: Sequence[Token]) -> Token:
    """Run the model on the token that follows the cached tokens. Of these, only the keys and values are read."""
    position = len(cache)
    x = EMBEDDING[token_id]
    h = norm(x)
    query, key, value = product(W_Q, h), product(W_K, h), product(W_V, h)
    turned_query, turned_key = turn(query, position), turn(key, position)
    keys = [*(token.turned_key for token in cache), turned_key]
    values = [*(token.value for token in cache), value]
    scores, weights, mixed = attend(turned_query, keys, values)
    r = [a + b for a, b in zip(x, product(W_O, mixed), strict=True)]
    h2 = norm(r)
    (gate,), (up,) = product(W_GATE, h2), product(W_UP, h2)
    out = [a + b for a, b in zip(r, product(W_DOWN, [gate / (1 + math.exp(-gate)) * up]), strict=True)]
    logits = product(HEAD, norm(out))
    return Token(x, h, query, key, value, turned_query, turned_key, scores, weights, mixed, r, out, logits)


def computed(token_ids: Sequence[int]) -> list[Token]:
    """Run the model by hand over a text. Return the intermediate results of each token, in order.

    Each token sees the keys and values of the tokens before it.
    """
    tokens: list[Token] = []
    for token_id in token_ids:
        tokens.append(compute(token_id, tokens))
    return tokens
