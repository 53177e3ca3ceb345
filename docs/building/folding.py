"""Folded parts of pages, which a reader opens."""

from __future__ import annotations


def folded(title: str, text: str, kind: str = "note") -> str:
    """Return text in a folded box. `kind` is the theme's name of a colour and a sign."""
    return f'??? {kind} "{title}"\n\n{indented(text)}\n'


def indented(text: str) -> str:
    """Return text that Markdown takes as part of the line above it."""
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())
