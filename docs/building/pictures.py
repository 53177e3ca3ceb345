"""SVG for pages. Classes of shapes get their colours, light and dark, from `docs/assets/style.css`."""

from __future__ import annotations

from collections.abc import Sequence

SIZE, STEP = 12, 14
KINDS = {"p": "prefill", "d": "decode", "i": "idle", ".": "hidden"}


def sketch(*rows: str) -> str:
    """Draw a small grid, without a frame.

    Args:
        rows: a letter for each cell: `p` a prompt's token, `d` one more token, `i` computed for nobody, `.` kept or
            empty. Any other letter is written as it is.
    """
    shapes = []
    for y, row in enumerate(rows):
        for x, letter in enumerate(row):
            if letter in KINDS:
                place = f'x="{x * STEP}" y="{y * STEP}" width="{SIZE}" height="{SIZE}"'
                shapes.append(f'<rect {place} rx="2" class="{KINDS[letter]}"/>')
            elif letter != " ":
                shapes.append(text((x + 0.5) * STEP, (y + 1) * STEP, letter, "step"))
    width, height = 9 * STEP, 4 * STEP
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg {size} aria-hidden="true">{"".join(shapes)}</svg>'


def figure(width: float, height: float, shapes: Sequence[str], title: str, legend: str) -> str:
    """Return shapes as a picture that scrolls sideways where it is wider than the page."""
    svg = (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" '
        f'aria-label="{title}">{"".join(shapes)}</svg>'
    )
    return f'<div class="picture"><div class="scroll">{svg}</div><div class="legend">{legend}</div></div>\n'


def text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{text}</text>'
