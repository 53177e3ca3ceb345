"""Sampling of the token after one prompt by the tiny model: a picture of the interval from 0 to 1, and a table.

The server's own sampler chooses a token for each of many numbers, spread evenly from 0 to 1. So each token gets the
part of the interval in which the sampler's random number would choose it.
"""

from __future__ import annotations

import functools
import html
import itertools
from collections import Counter
from collections.abc import Sequence

import torch

from common.engine.reference import ContiguousCache
from common.kv import Span
from common.models.layers import TokenBatch
from common.models.registry import load_model, open_checkpoint
from common.request import Request, SamplingParams
from common.sampling.draw import sample
from docs.building.markdown import table
from docs.building.pictures import figure, text

MODEL = "zoo:llama-tiny"
PROMPT = "Once upon a time there was a kind old bear. One day"
NUMBERS = 1000
NUMBER = 0.62  # the random number in the picture
SHOWN = 6  # tokens with a row of their own in the table

#: The settings in the table. `PICTURED` names the settings in the picture.
COUNTED = {
    "temperature 1": SamplingParams(),
    "temperature 0.5": SamplingParams(temperature=0.5),
    "temperature 2": SamplingParams(temperature=2.0),
    "top-k 3": SamplingParams(top_k=3),
    "top-p 0.7": SamplingParams(top_p=0.7),
    "min-p 0.2": SamplingParams(min_p=0.2),
}
PICTURED = ("temperature 1", "temperature 0.5", "top-k 3")


class NumberedRequest(Request):
    """A request whose next random number is `number`."""

    number: float

    def next_uniform(self, ahead: int = 0) -> float:  # noqa: ARG002 - one token is sampled
        return self.number


@functools.cache
def _logits() -> torch.Tensor:
    """Return the logits after the prompt: [vocab]."""
    checkpoint = open_checkpoint(MODEL)
    device = torch.device("cpu")
    model = load_model(checkpoint, device=device, dtype=torch.float32, max_positions=256)
    ids = checkpoint.tokenizer().encode(PROMPT)
    cache = ContiguousCache(model.config.kv_shape(model.dtype), device, len(ids))
    cache.reserve(Request("prompt", ids, SamplingParams()), len(ids))
    view = cache.view([Span.exact(0, 0, len(ids))])
    logits: torch.Tensor = model(
        TokenBatch(torch.tensor(ids), view.positions, torch.tensor([len(ids) - 1])), view
    )
    return logits[0]


def drawn(params: SamplingParams, numbers: Sequence[float]) -> list[str]:
    """Return for each random number the text of the token that it chooses after the prompt."""
    requests = []
    for number in numbers:
        request = NumberedRequest("a number", [0], params)
        request.number = number
        requests.append(request)
    chosen = sample(_logits().expand(len(numbers), -1), requests).token_ids.tolist()
    tokenizer = open_checkpoint(MODEL).tokenizer()
    return [tokenizer.token_text(token_id).strip() for token_id in chosen]


def _numbers() -> list[float]:
    """Return the numbers from 0 to 1 that stand for random numbers in the picture and the table."""
    return [(place + 0.5) / NUMBERS for place in range(NUMBERS)]


def interval_picture() -> str:
    """Draw the interval from 0 to 1 under three settings. Each token that is chosen gets a part of the interval."""
    left, width, height, between = 112, 448, 30, 40
    shapes = []
    for row, name in enumerate(PICTURED):
        top = 8 + between * row
        shapes.append(text(0, top + 20, name, "label"))
        x = float(left)
        kinds = itertools.cycle(("decode", "prefill"))
        for (token, run), kind in zip(
            itertools.groupby(drawn(COUNTED[name], _numbers())), kinds, strict=False
        ):
            length = len(list(run)) / NUMBERS * width
            shapes.append(
                f'<rect class="{kind}" x="{x:.1f}" y="{top}" width="{max(length - 1, 0.5):.1f}" height="{height}"/>'
            )
            if length > 8 * len(token):
                shapes.append(text(x + length / 2, top + 20, html.escape(token), f"on-{kind}"))
            x += length
    at = left + NUMBER * width
    shapes.append(f'<path class="line idle" d="M{at:.1f} 0V128"/>')
    shapes.append(text(at, 140, f"u = {NUMBER}", "step"))
    return figure(left + width, 146, shapes, f"The token that the number {NUMBER} falls on", "")


def filters_table() -> str:
    """Return the table of how often each of the most likely tokens is chosen, by setting. All other tokens share
    the last row."""
    counts = {name: Counter(drawn(params, _numbers())) for name, params in COUNTED.items()}
    likely = [token for token, _ in counts["temperature 1"].most_common(SHOWN)]
    rows = [
        [f"`{token}`", *(f"{count[token] / NUMBERS:.0%}" for count in counts.values())] for token in likely
    ]
    others = [
        f"{1 - sum(count[token] for token in likely) / NUMBERS:.0%} ({len(count.keys() - set(likely))})"
        for count in counts.values()
    ]
    return table(["token", *counts], [*rows, ["*other tokens (how many)*", *others]])
