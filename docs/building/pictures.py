"""SVG for pages. Shapes have CSS classes, whose light and dark colours are in `docs/assets/style.css`."""

from __future__ import annotations

from collections.abc import Sequence


def figure(width: float, height: float, shapes: Sequence[str], title: str, legend: str) -> str:
    """Return shapes as a picture that scrolls sideways where it is wider than the page."""
    svg = (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" '
        f'aria-label="{title}">{"".join(shapes)}</svg>'
    )
    return f'<div class="picture"><div class="scroll">{svg}</div><div class="legend">{legend}</div></div>\n'


def text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{text}</text>'
