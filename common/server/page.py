"""The page at `/`: what runs here, a form to try it, and the engine's steps. It loads nothing from elsewhere.

The documentation's site has the same viewer.
"""

from __future__ import annotations

import html
from importlib import resources
from string import Template

from common.engine import Engine
from common.server import viewer
from common.server.schemas.completion import DEFAULT_MAX_TOKENS

#: A browser holds the page to it: its own script and style, this server, and nothing else.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
}


MOST_COPIES = 32  # of a prompt that the form sends at once


def render_page(engine: Engine, model_name: str, *, live_view: bool) -> str:
    """The page of an app that serves `engine`'s model under `model_name`."""
    template = Template(resources.files("common.server").joinpath("page.html").read_text("utf-8"))
    most_tokens = engine.max_seq_len - 1
    values = {
        "number": engine.phase.number,
        "title": engine.phase.title.lower(),
        "idea": engine.phase.idea,
        "model": model_name,
        "max_seq_len": engine.max_seq_len,
        "most_tokens": most_tokens,
        "most_copies": min(MOST_COPIES, engine.config.max_waiting_requests),
        "max_tokens": min(DEFAULT_MAX_TOKENS, most_tokens),
    }
    escaped = {name: html.escape(str(value)) for name, value in values.items()}
    parts = {"viewer": viewer.script(), "viewer_style": viewer.style()}
    return template.substitute(escaped | parts, live_view="on" if live_view else "off")
