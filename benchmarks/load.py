"""The cores that other programs take, looked at while no server of ours runs."""

from __future__ import annotations

import psutil

SAMPLE_S = 0.4
BUSY_SHARE = 0.15  # of the machine; a desktop at rest stays below


def cores_taken() -> float:
    """Return how many cores are busy now. Blocks for `SAMPLE_S`; call it while nothing of ours computes."""
    return float(psutil.cpu_percent(SAMPLE_S)) / 100 * cores()


def is_busy(taken: float) -> bool:
    """True if so many busy cores change what is measured beside them."""
    return taken > BUSY_SHARE * cores()


def in_words(taken: float) -> str:
    return f"other programs took {taken:.1f} of {cores()} cores"


def cores() -> int:
    """Return the number of the machine's logical cores."""
    return psutil.cpu_count() or 1
