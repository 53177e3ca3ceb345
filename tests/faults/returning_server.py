"""A phase's server that returns freed memory each second."""

from __future__ import annotations

from collections.abc import Sequence

from common.server import logs
from common.server import run as serve

PULSE_EVERY_S = 1.0


def main(phase: str, flags: Sequence[str]) -> None:
    logs.PULSE_EVERY_S = PULSE_EVERY_S
    serve.main(phase, flags)
