"""The looks of all figures, light and dark. Colour-blind readers can tell the colours (Okabe and Ito's) apart.

M. Okabe, K. Ito: Color Universal Design, 2008.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#888888"

#: A phase has the same colour in every figure; peers are grey, told apart by their dashes and hatches.
PHASE_COLOURS = {4: ORANGE, 5: SKY, 6: GREEN, 7: VERMILION, 8: PURPLE, 9: BLUE}
HATCHES = ("", "///", "...", "xxx", "ooo")
DASHES = ("-", "--", ":", "-.")


#: The colours that depend on the background. Figures are drawn in the light ones.
INK, FAINT, PAPER = "#24292f", "#d5d9de", "#ffffff"
_IN_THE_DARK = {INK: "#d7dbe0", FAINT: "#3c424a", PAPER: "#1e2129"}

_SETTINGS: Any = {
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
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), PAPER),
    "grid.color": FAINT,
}


@contextmanager
def styled() -> Iterator[None]:
    """Context manager: draw in these looks, without the settings of the user's matplotlibrc."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_SETTINGS)
        yield


def in_the_dark(svg: str) -> str:
    """Return a figure's SVG with the colours of a dark page. To draw it once more would take as long again."""
    return re.sub("|".join(_IN_THE_DARK), lambda found: _IN_THE_DARK[found[0]], svg)
