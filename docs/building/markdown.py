"""Tables and folded parts of pages, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MARKS = {"l": "---", "r": "---:", "c": ":---:"}


def table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "") -> str:
    """Return a table. `align` has `l`, `r` or `c` for each column: the first left and the others right if empty."""
    align = align or "l" + "r" * (len(head) - 1)
    lines = [head, [MARKS[each] for each in align], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def folded(title: str, text: str, kind: str = "note") -> str:
    """Return text in a folded box. `kind` is the theme's name of a colour and a sign."""
    return f'??? {kind} "{title}"\n\n{indented(text)}\n'


def indented(text: str) -> str:
    """Return text that Markdown takes as part of the line above it."""
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())
