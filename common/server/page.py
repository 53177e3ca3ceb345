"""The page at `/`: a form that chats with the model or lets it continue a text, and the engine's steps.

The page loads nothing from elsewhere. `viewer/` draws the engine's steps, here and on the documentation's site.
"""

from __future__ import annotations

import html
from importlib import resources
from string import Template

from common.engine import Engine

#: Headers that restrict the page to its own script and style, and to this server.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
}

#: Parts of the viewer's script, in `viewer/`. Each part uses only the parts before it.
VIEWER_PARTS = ("trace", "shapes", "seats", "memory", "panel", "viewer")

#: The form's default for `max_tokens`: stories of the bundled models are shorter.
MOST_TOKENS = 512
MOST_COPIES = 32  # requests with the same prompt that the form sends at once
STORIES = 6

#: Words of the form for a model with a chat template, and for a model that only continues text.
CHAT = {
    "mode": "chat",
    "verb": "Send",
    "prompt_label": "Message",
    "prompt": "Tell me a story about an owl named Nora.",
}
COMPLETION = {
    "mode": "completion",
    "verb": "Complete",
    "prompt_label": "Text to continue",
    "prompt": "Once there was a young owl named Nora.",
}


def render_page(engine: Engine, model_name: str, *, live_view: bool) -> str:
    """Return the page of an app that serves `engine`'s model under `model_name`."""
    template = Template(_read("page.html"))
    most_tokens = engine.max_seq_len - 1
    most_copies = min(MOST_COPIES, engine.config.max_waiting_requests)
    words = COMPLETION if engine.tokenizer.chat_template is None else CHAT
    values = {
        "number": engine.phase.number,
        "title": engine.phase.title.lower(),
        "idea": engine.phase.idea,
        "model": model_name,
        "max_seq_len": engine.max_seq_len,
        "most_tokens": most_tokens,
        "most_copies": most_copies,
        "max_tokens": min(MOST_TOKENS, most_tokens),
        "stories": min(STORIES, most_copies),
    }
    escaped = {name: html.escape(str(value)) for name, value in (values | words).items()}
    parts = {"viewer": viewer_script(), "viewer_style": viewer_style()}
    return template.substitute(escaped | parts, live_view="on" if live_view else "off")


def viewer_script() -> str:
    """Return the JavaScript that draws step traces."""
    return "\n".join(_read(f"viewer/{part}.js") for part in VIEWER_PARTS)


def viewer_style() -> str:
    """Return the viewer's style sheet."""
    return _read("viewer/viewer.css")


def _read(name: str) -> str:
    return resources.files("common.server").joinpath(name).read_text("utf-8")
