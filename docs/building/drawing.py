"""What the sampler makes of one row of logits: asked of the sampler itself when the site is built."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from common.generate import ContiguousCache
from common.kv import KVShape, Span
from common.models.layers import TokenBatch
from common.models.registry import load_model, open_checkpoint
from common.request import Request, SamplingParams
from common.sampling import SamplingInputs, choose
from docs.building.pictures import figure, text

MODEL, PROMPT = "zoo:llama-tiny", "Once upon a time there was a kind old bear. One day"
NUMBERS = 1000  # evenly spaced in [0, 1)
SHOWN = 6

SETTINGS = {
    "temperature 1": SamplingParams(),
    "temperature 0.5": SamplingParams(temperature=0.5),
    "temperature 2": SamplingParams(temperature=2.0),
    "top-k 3": SamplingParams(top_k=3),
    "top-p 0.7": SamplingParams(top_p=0.7),
    "min-p 0.2": SamplingParams(min_p=0.2),
}


@functools.cache
def _logits() -> tuple[Tensor, tuple[str, ...]]:
    """[1, vocab] logits after the prompt, and each token as text."""
    checkpoint = open_checkpoint(MODEL)
    tokenizer = checkpoint.tokenizer()
    token_ids = tokenizer.encode(PROMPT)
    model = load_model(
        checkpoint, device=torch.device("cpu"), dtype=torch.float32, max_positions=len(token_ids)
    )
    cache = ContiguousCache(KVShape.of(model.config, model.dtype), model.device, len(token_ids))
    cache.reserve(Request("prompt", token_ids, SamplingParams()), len(token_ids))
    view = cache.view([Span.exact(0, 0, len(token_ids))])
    rows = torch.tensor([len(token_ids) - 1])
    logits = model(TokenBatch(torch.tensor(token_ids), view.positions, rows), view)
    return logits, tuple(tokenizer.decode([i]).strip() for i in range(model.config.vocab_size))


@functools.cache
def shares(setting: str) -> dict[int, float]:
    """How often each token is chosen if the request's random number takes all values evenly, most often first."""
    logits, _ = _logits()
    numbers = (torch.arange(NUMBERS, dtype=torch.float64) + 0.5) / NUMBERS
    requests = [Request(f"{i}", [0], SETTINGS[setting]) for i in range(NUMBERS)]
    inputs = SamplingInputs.of(requests, None, logits.shape[-1], logits.device)
    assert inputs.settings is not None
    settings = torch.cat([inputs.settings[:, :-1], numbers.unsqueeze(1)], dim=1)  # the last one is the number
    chosen = choose(logits.expand(NUMBERS, -1), inputs._replace(settings=settings)).token_ids
    counts = torch.bincount(chosen, minlength=logits.shape[-1])
    ids = counts.argsort(descending=True, stable=True)
    return {int(i): int(counts[i]) / NUMBERS for i in ids if counts[i]}


def sampling_prompt() -> str:
    return PROMPT


def filters_table() -> str:
    """The most likely tokens, and how often each is chosen under some settings."""
    spelled = _logits()[1]
    first = list(shares("temperature 1"))[:SHOWN]
    rows = [f"| token | {' | '.join(SETTINGS)} |", f"| --- |{' ---: |' * len(SETTINGS)}"]
    for token_id in first:
        cells = [f"{100 * shares(setting).get(token_id, 0):.0f} %" for setting in SETTINGS]
        rows.append(f"| `{spelled[token_id]}` | {' | '.join(cells)} |")
    others = [100 * sum(share for i, share in shares(s).items() if i not in first) for s in SETTINGS]
    counts = [sum(i not in first for i in shares(s)) for s in SETTINGS]
    cells = [f"{share:.0f} % ({count})" for share, count in zip(others, counts, strict=True)]
    return "\n".join([*rows, f"| *others (how many)* | {' | '.join(cells)} |"]) + "\n"


def interval_picture(number: float = 0.62) -> str:
    """The interval from 0 to 1, cut among tokens, under three settings; and what one number falls on."""
    spelled = _logits()[1]
    width, left, height = 560, 112, 30
    shapes = []
    settings = ("temperature 1", "temperature 0.5", "top-k 3")
    for row, setting in enumerate(settings):
        y, x = 8 + row * (height + 10), float(left)
        shapes.append(text(0, y + 20, setting, "label"))
        # By probability where an order is needed, by token id where none is: both are cut in the sampler's order.
        order = shares(setting).items() if setting.startswith("top") else sorted(shares(setting).items())
        for index, (token_id, share) in enumerate(order):
            length = share * (width - left)
            kind = ("decode", "prefill")[index % 2]
            shapes.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(length - 1, 0.5):.1f}" height="{height}" class="{kind}"/>'
            )
            if length > 9 * len(spelled[token_id]) + 4:
                shapes.append(text(x + length / 2, y + 20, spelled[token_id], f"on-{kind}"))
            x += length
    x = left + number * (width - left)
    bottom = 8 + len(settings) * (height + 10)
    shapes.append(f'<path class="line idle" d="M{x:.1f} 0V{bottom}"/>')
    shapes.append(text(x, bottom + 12, f"u = {number}", "step"))
    return figure(width, bottom + 18, shapes, f"Which token the number {number} falls on", "")
