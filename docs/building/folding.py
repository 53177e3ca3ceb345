"""What stands on a page folded, until somebody wants to see it."""

from __future__ import annotations


def folded(title: str, text: str, kind: str = "note") -> str:
    """`kind` is the theme's: it chooses a colour and a sign."""
    return f'??? {kind} "{title}"\n\n{indented(text)}\n'


def indented(text: str) -> str:
    """As what belongs to the line above it."""
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())
