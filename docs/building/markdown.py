"""Tables and boxes that open on a click, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MARKS = {"l": "---", "r": "---:", "c": ":---:"}


def table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "") -> str:
    """Return a table. `align` has `l`, `r` or `c` for each column; empty: the first is left, the others right."""
    align = align or "l" + "r" * (len(head) - 1)
    lines = [head, [MARKS[each] for each in align], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def folded(title: str, text: str, kind: str = "note") -> str:
    """Return text in a box that opens on a click. `kind` names its colour and icon, such as `note` or `tip`."""
    return f'??? {kind} "{title}"\n\n{indented(text)}\n'


def indented(text: str) -> str:
    """Indent text by four spaces, so that Markdown takes it as the content of the box or tab above it."""
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())
