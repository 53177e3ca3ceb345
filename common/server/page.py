"""The page at `/`: what runs here, and a form to try it. One file, with nothing that is loaded from elsewhere."""

from __future__ import annotations

import html
from importlib import resources
from string import Template

from common.engine import Engine
from common.server.schemas.completion import DEFAULT_MAX_TOKENS

#: A browser holds the page to it: its own script and style, this server, and nothing else.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
}


def render_page(engine: Engine, model_name: str) -> str:
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
        "max_tokens": min(DEFAULT_MAX_TOKENS, most_tokens),
    }
    return template.substitute({name: html.escape(str(value)) for name, value in values.items()})
