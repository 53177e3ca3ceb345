"""The start page's picture: a card for each phase, with a sketch of its idea and the figure that it is known by."""

from __future__ import annotations

from common.phases import find_phase, phase_names
from docs.building.criteria import ratio
from docs.building.pictures import text

SIZE, STEP = 12, 14
KINDS = {"p": "prefill", "d": "decode", "i": "idle", ".": "hidden"}

LEGEND = (
    ("prefill", "a prompt's token"),
    ("decode", "one more token"),
    ("idle", "computed for nobody"),
    ("hidden", "kept, or empty"),
)

#: Pages of what is no package: number, title, idea, page.
FIRST = (
    (1, "The model", "from token ids to a score for every next token", "model"),
    (2, "Sampling", "one number of the request's own chooses a token", "sampling"),
    (3, "The KV cache", "compute one token, not the whole text again", "cache"),
)

#: Sketches: `p` a prompt's token, `d` one more token, `i` computed for nobody, `.` memory or time without use.
SKETCHES = {
    1: ("  dddddd", "  dddddd", "  dddddd", "pppppppp"),
    2: ("        ", "ddddppdi", "   d    ", "        "),
    3: ("p       ", ".p      ", "..p     ", "...p    "),
    4: ("pppddiii", "p.iddddd", "pp.ddiii", "        "),
    5: ("pppddppd", "pddddddd", "ppddpddd", "        "),
    6: ("dd dd dd", "dd p. dd", "dd dd pp", "p. dd .."),
    7: ("dddddddd", "dddddddd", "pppppppd", "        "),
    8: ("ddddpp  ", "    pp  ", "    pppp", "        "),
    9: ("pdpdpdpd", " dddddddd", "        ", "        "),
}

#: The comparison that a phase is known by: workload, servers, line, how it is called, model.
KNOWN_BY = {
    4: ("mixed", "generate()", "phase 4", "output tokens / s", "throughput", "dummy:llama-60m"),
    5: (
        "continuous_batching",
        "phase 4",
        "phase 5",
        "TTFT p99",
        "first token, p99",
        "dummy:llama-60m",
    ),
    6: ("paged_attention", "phase 5", "phase 6", "output tokens / s", "throughput", "dummy:llama-60m"),
    7: ("chunked_prefill", "phase 6", "phase 7", "longest stall", "longest stall", "dummy:llama-60m"),
    8: (
        "prefix_caching",
        "phase 7",
        "phase 8",
        "TTFT p50",
        "first token, p50",
        "dummy:llama-60m",
    ),
    9: (
        "baseline",
        "phase 9, pipeline-depth=0",
        "phase 9",
        "output tokens / s",
        "throughput",
        "zoo:llama-tiny",
    ),
}


def course_picture() -> str:
    """Nine cards that lead to their pages."""
    cards = [_card(number, title, idea, page, "") for number, title, idea, page in FIRST]
    for name in phase_names():
        phase = find_phase(name).PHASE
        page = phase.slug.partition("_")[2]
        cards.append(_card(phase.number, phase.title, phase.idea, page, _figure(phase.number)))
    legend = " ".join(f'<span class="key {kind}">{words}</span>' for kind, words in LEGEND)
    return f'<div class="course">{"".join(cards)}</div>\n<div class="legend">{legend}</div>\n'


def _figure(number: int) -> str:
    """What a phase is known by, in words; nothing for one that nobody has compared."""
    if number not in KNOWN_BY:
        return ""
    workload, before, after, line, called, model = KNOWN_BY[number]
    against = "one step at a time" if "depth" in before else before
    return f"{called} {ratio(workload, before, after, line, model)} against {against}"


def _card(number: int, title: str, idea: str, page: str, said: str) -> str:
    shapes = [
        f'<rect x="{x * STEP}" y="{y * STEP}" width="{SIZE}" height="{SIZE}" rx="2" class="{KINDS[kind]}"/>'
        for y, row in enumerate(SKETCHES.get(number, ()))
        for x, kind in enumerate(row)
        if kind in KINDS
    ]
    if number == 2:
        shapes.append(text(3.5 * STEP, 4 * STEP, "u", "step"))
    width, height = 9 * STEP, 4 * STEP
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    sketch = f'<svg {size} aria-hidden="true">{"".join(shapes)}</svg>'
    figure = f"<em>{said}</em>" if said else ""
    return (
        f'<a class="picture card" href="phases/{page}.html">{sketch}<strong>{number}: {title}</strong>'
        f"<span>{idea}</span>{figure}</a>"
    )
