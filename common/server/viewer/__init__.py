"""The viewer of step traces, for a server's page and for the documentation: one script and one style sheet."""

from __future__ import annotations

from importlib import resources

PARTS = ("trace", "shapes", "seats", "memory", "panel", "viewer")  # each uses only those before it


def script() -> str:
    """All of its JavaScript."""
    return "\n".join(_read(f"{part}.js") for part in PARTS)


def style() -> str:
    return _read("viewer.css")


def _read(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text("utf-8")
