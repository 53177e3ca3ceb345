"""The streams of a command."""

from __future__ import annotations

import io
import sys


def replace_unknown_characters() -> None:
    """Make characters that the terminal's encoding lacks question marks, in what is printed and in what is read.

    Python would raise UnicodeEncodeError. It prints to stderr with escapes instead.
    """
    for file in (sys.stdin, sys.stdout):
        if isinstance(file, io.TextIOWrapper):
            file.reconfigure(errors="replace")
