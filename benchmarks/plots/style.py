"""The looks of all figures, light and dark. Colour-blind readers can tell the colours (Okabe and Ito's) apart.

M. Okabe, K. Ito: Color Universal Design, 2008.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#888888"

#: A phase has the same colour in every figure; peers are grey, told apart by their dashes and hatches.
PHASE_COLOURS = {4: ORANGE, 5: SKY, 6: GREEN, 7: VERMILION, 8: PURPLE, 9: BLUE}
HATCHES = ("", "///", "...", "xxx", "ooo")
DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True, slots=True)
class Theme:
    """A theme of figures, light or dark: the colours that depend on the background."""

    name: str
    ink: str
    faint: str
    paper: str


THEMES = (
    Theme("light", ink="#24292f", faint="#d5d9de", paper="#ffffff"),
    Theme("dark", ink="#d7dbe0", faint="#3c424a", paper="#1e2129"),
)

_COMMON: dict[str, Any] = {
    "backend": "svg",
    "svg.hashsalt": "infer",  # ids inside a file depend on its content alone: the same data give the same bytes
    "svg.fonttype": "path",
    "figure.dpi": 100,
    "savefig.bbox": "tight",
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same on every machine
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "path.simplify": True,
}


def _coloured(theme: Theme) -> dict[str, Any]:
    inked = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor")
    papered = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    return dict.fromkeys(inked, theme.ink) | dict.fromkeys(papered, theme.paper) | {"grid.color": theme.faint}


@contextmanager
def themed(theme: Theme) -> Iterator[None]:
    """Context manager: draw in this theme, without the settings of the user's matplotlibrc."""
    with mpl.rc_context():
        mpl.rcdefaults()
        settings: Any = _COMMON | _coloured(theme)
        mpl.rcParams.update(settings)
        yield
