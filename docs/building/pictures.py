"""SVG for pages. Shapes have CSS classes, whose light and dark colours are in `docs/assets/style.css`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

BAR, GAP = 16, 4  # of bars, in pixels


class Bar(NamedTuple):
    """A bar, with the text `label` before it and the text `written` (its value) after it. `kind` is its CSS class.
    If `opens_group`, there is more space above the bar."""

    label: str
    value: float
    written: str
    kind: str = "decode"
    opens_group: bool = False


def bars(
    shown: Sequence[Bar], title: str, legend: str = "", *, labels: float, width: float = 560, most: float = 0
) -> str:
    """Draw horizontal bars, one below the other.

    Args:
        labels: width of the labels, in pixels.
        most: the value that a bar of full length has; 0: the largest value.
    """
    most = most or max(bar.value for bar in shown)
    shapes = []
    y = 0
    for place, (label, value, written, kind, opens_group) in enumerate(shown):
        y += 2 * GAP if opens_group and place else 0
        length = max(value / most * (width - labels - 110), 1)
        shapes.append(text(0, y + 13, label, "label"))
        size = f'width="{length:.1f}" height="{BAR}"'
        shapes.append(f'<rect x="{labels:g}" y="{y}" {size} rx="2" class="{kind}"/>')
        shapes.append(text(labels + length + 6, y + 13, written, "label"))
        y += BAR + GAP
    return figure(width, y, shapes, title, legend)


def figure(width: float, height: float, shapes: Sequence[str], title: str, legend: str) -> str:
    """Return shapes as a picture that scrolls sideways where it is wider than the page."""
    svg = (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" '
        f'aria-label="{title}">{"".join(shapes)}</svg>'
    )
    return f'<div class="picture"><div class="scroll">{svg}</div><div class="legend">{legend}</div></div>\n'


def text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{text}</text>'
