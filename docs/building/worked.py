"""Tables and a picture of the worked example on the pages of phases 1 to 3, computed by `docs.building.by_hand`."""

from __future__ import annotations

import itertools

from docs.building import by_hand as model
from docs.building.by_hand import TEXT, WORDS, Vector, computed, softmax
from docs.building.markdown import table
from docs.building.pictures import figure, text

U = 0.69  # the random number of the sampling example
TEMPERATURES = (1.0, 0.5, 2.0)
PROMPT, ANSWER = 100, 100  # tokens, in the example that counts work with a cache and without

#: The model's computations for one token: name, formula, field of `Token`.
STEPS = (
    ("embedding", "x = row of E", "embedded"),
    ("norm", "h = x / √(mean of x²)", "normed"),
    ("query", "q = W<sub>q</sub> h", "query"),
    ("key", "k = W<sub>k</sub> h", "key"),
    ("value", "v = W<sub>v</sub> h", "value"),
    ("query, turned", "q by position · 1 radian", "turned_query"),
    ("key, turned", "k by position · 1 radian", "turned_key"),
    ("scores", "q · k / √2, for each k so far", "scores"),
    ("weights", "softmax of the scores", "weights"),
    ("mean", "a = Σ weight · v", "mixed"),
    ("added", "r = x + W<sub>o</sub> a", "after_attention"),
    ("MLP, added", "y = r + W<sub>down</sub> (silu(gate) · up)", "after_mlp"),
    ("logits", "W<sub>head</sub> norm(y)", "logits"),
)


def _numbers(numbers: Vector) -> str:
    return ", ".join(f"{number:.2f}".replace("-0.00", "0.00") for number in numbers)


def weights_by_hand() -> str:
    """Return the weights of the worked example as a block of text, a matrix in each line."""
    matrices = {
        "E": model.EMBEDDING,
        "W_q": model.W_Q,
        "W_k": model.W_K,
        "W_v": model.W_V,
        "W_o": model.W_O,
        "W_gate": model.W_GATE,
        "W_up": model.W_UP,
        "W_down": model.W_DOWN,
        "W_head": model.HEAD,
    }
    lines = [
        f"{name:<8}" + "   ".join(f"({', '.join(f'{number:g}' for number in row)})" for row in matrix)
        for name, matrix in matrices.items()
    ]
    return "```text\n" + "\n".join(lines) + "\n```\n"


def model_by_hand() -> str:
    """Return the table of all intermediate results of the worked example, a row for each entry of `STEPS`."""
    tokens = computed(TEXT)
    head = ["step", "formula", *(f"`{WORDS[i]}`, position {place}" for place, i in enumerate(TEXT))]
    rows = [
        [name, formula, *(_numbers(getattr(token, field)) for token in tokens)]
        for name, formula, field in STEPS
    ]
    return table(head, rows, "llll")


def by_hand(expression: str) -> str:
    """Return a result for the second token of the worked example, for a sentence.

    Args:
        expression: a field of `Token`, or `probability`, and optionally an index: `weights`, `scores 0`,
            `probability 2`.
    """
    token = computed(TEXT)[-1]
    name, _, index = expression.partition(" ")
    numbers = softmax(token.logits) if name == "probability" else getattr(token, name)
    return _numbers([numbers[int(index)]] if index else numbers)


def attention_picture() -> str:
    """Draw the second token's query beside both keys, and the weighted mean of both values between them."""
    first, second = computed(TEXT)
    arrows = [
        ("q of cat", second.turned_query, "prefill"),
        ("k of the", first.turned_key, "decode"),
        ("k of cat", second.turned_key, "sample"),
    ]
    points = [
        ("v of the", first.value, "decode"),
        ("v of cat", second.value, "sample"),
        ("a", second.mixed, "prefill"),
    ]
    unit, floor, left, right = 42, 136, 96, 226

    def at(origin: float, place: Vector) -> tuple[float, float]:
        return origin + place[0] * unit, floor - place[1] * unit

    def mark(x: float, y: float, name: str, kind: str, label: float) -> None:
        shapes.append(f'<rect class="{kind}" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" rx="4"/>')
        shapes.append(text(x + label, y - 7, name, "label"))

    shapes = []
    for origin, low in ((left, -2), (right, 0)):
        start, end = origin + low * unit, origin + 2 * unit
        shapes.append(f'<path class="grid" d="M{start} {floor}H{end}M{origin} {floor + 8}V10"/>')
    for name, vector, kind in arrows:
        x, y = at(left, vector)
        shapes.append(f'<path class="line {kind}" d="M{left} {floor}L{x:.1f} {y:.1f}"/>')
        mark(x, y, name, kind, 6 if vector[0] > 0 else -46)
    (x1, y1), (x2, y2) = (at(right, token.value) for token in (first, second))
    shapes.append(f'<path class="grid" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>')
    for name, vector, kind in points:
        mark(*at(right, vector), name, kind, 8)
    legend = (
        "Left: the query of <em>cat</em> and both keys, turned by their positions. The closer a key's "
        "direction, the higher its score. Right: the mean <em>a</em> lies on the line between the two values, "
        "nearer to the value with the larger weight."
    )
    return figure(350, 150, shapes, "Attention of the second token, drawn in two dimensions", legend)


# ---------------------------------------------------------------------- phase 2


def sampling_by_hand() -> str:
    """Return the table of probabilities and running sums, by temperature, with the token that `U` chooses."""
    logits = computed(TEXT)[-1].logits
    columns = [["logit", *(f"{logit:.2f}" for logit in logits), ""]]
    for temperature in TEMPERATURES:
        chances = softmax([logit / temperature for logit in logits])
        sums = itertools.accumulate(chances)
        chosen = chosen_by(U, logits, temperature)
        columns.append([f"probability at {temperature:g}", *(f"{chance:.0%}" for chance in chances), ""])
        cells = [
            f"**{total:.2f}**" if place == chosen else f"{total:.2f}" for place, total in enumerate(sums)
        ]
        columns.append(["running sum", *cells, f"`{WORDS[chosen]}`"])
    head, *rows = zip(*columns, strict=True)
    names = [*(f"`{word}`" for word in WORDS), f"{U} falls on"]
    return table(["token", *head], [[name, *row] for name, row in zip(names, rows, strict=True)])


def chosen_by(u: float, logits: Vector, temperature: float) -> int:
    """Return the first token whose running sum of probabilities exceeds `u`."""
    sums = itertools.accumulate(softmax([logit / temperature for logit in logits]))
    return next(place for place, total in enumerate(sums) if total > u)


# ---------------------------------------------------------------------- phase 3


def cache_by_hand() -> str:
    """Return the table of both passes of the worked example: the keys and values that each pass computes, and the
    tokens that it chooses."""
    kept = computed(TEXT)
    chosen = max(range(len(WORDS)), key=kept[-1].logits.__getitem__)
    longer = computed((*TEXT, chosen))
    assert longer[: len(kept)] == kept, "a later token has changed an earlier one"
    following = max(range(len(WORDS)), key=longer[-1].logits.__getitem__)
    rows = [
        [WORDS[token_id], _numbers(token.turned_key), _numbers(token.value), _numbers(token.weights), made]
        for token_id, token, made in zip((*TEXT, chosen), longer, ("pass 1", "pass 1", "pass 2"), strict=True)
    ]
    said = (
        f"Pass 1 computed *the cat*, and its logits chose `{WORDS[chosen]}`. Pass 2 computes that token alone. Its "
        f"logits choose `{WORDS[following]}`:\n\n"
    )
    head = ["token", "key in the cache", "value in the cache", "weights of its query", "computed in"]
    return said + table(head, [[f"`{word}`", *cells] for word, *cells in rows], "lllll")


def work_without_cache() -> str:
    """Return a sentence with the number of tokens that are computed for an answer with a cache and without."""
    without = PROMPT * ANSWER + ANSWER * (ANSWER - 1) // 2
    kept = PROMPT + ANSWER - 1
    assert without == sum(range(PROMPT, PROMPT + ANSWER)), "the formula and the sum differ"
    return (
        f"For a prompt of {PROMPT} tokens and an answer of {ANSWER}: without a cache "
        f"*p · n + n (n − 1) / 2* = {without:,} tokens are computed, with a cache *p + n − 1* = {kept}. So without "
        f"a cache, {without / kept:.0f} times as many tokens are computed as with one."
    )
