"""The web page at `/`: conversations with the model, or texts that the model continues, beside the engine's steps.

The page loads nothing from other servers. Its source is in `chat_page/`. The scripts in `viewer/` draw the engine's
steps, here and on the documentation's site.
"""

from __future__ import annotations

import html
from importlib import resources
from string import Template

from common.hosting.async_engine import AsyncEngine

#: Headers that restrict the page to its own script and style, and to this server. No other page may show it in a
#: frame, where a user's clicks could be stolen.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'self'; form-action 'none'; frame-ancestors 'none'"
}

#: Parts of the viewer's script, in `viewer/`. Each part uses only the parts before it.
VIEWER_PARTS = ("trace", "shapes", "seats", "memory", "panel", "viewer")

#: Parts of the page's script, in `chat_page/`, after the viewer's.
PAGE_PARTS = ("words", "elements", "inline", "markdown", "conversations", "sending", "transcript", "page")

#: The form's default for `max_tokens`, or half of the longest request if that is less: the other half is for the
#: conversation so far. Stories of the bundled models are shorter.
MOST_TOKENS = 512
STARTERS = 12  # messages that may begin conversations at once: the length of `STARTERS` in `words.js`

#: Words of the form for a model with a chat template, and for a model that only continues text.
CHAT = {"mode": "chat", "verb": "Send", "prompt_label": "Message", "chat_only": ""}
COMPLETION = {
    "mode": "completion",
    "verb": "Complete",
    "prompt_label": "Text to continue",
    "chat_only": "hidden",
}


def render_page(engine: AsyncEngine, model_name: str, *, live_view: bool, root_path: str = "") -> str:
    """Return the HTML of the page, for an app that serves `engine`'s model under `model_name`."""
    template = Template(_read("chat_page/page.html"))
    facts = engine.facts
    most_tokens = facts.max_seq_len - 1
    at_once = conversations_at_once(facts.config.max_batch_size, facts.config.max_waiting_requests)
    defaults = facts.default_params
    words = COMPLETION if engine.maker.tokenizer.chat_template is None else CHAT
    tells_stories = words is CHAT and facts.config.model.startswith("zoo:")
    values = {
        "number": facts.phase.number,
        "title": facts.phase.title.lower(),
        "idea": facts.phase.idea,
        "model": model_name,
        "max_seq_len": facts.max_seq_len,
        "most_tokens": most_tokens,
        "max_tokens": max(1, min(MOST_TOKENS, facts.max_seq_len // 2)),
        "default_temperature": defaults.temperature,
        "default_top_p": defaults.top_p,
        "starters": "stories" if tells_stories else words["mode"],
        "at_once": at_once,
        "live_view": "on" if live_view else "off",
    }
    escaped = {name: html.escape(str(value)) for name, value in (values | words).items()}
    page_script = [_read(f"chat_page/{part}.js") for part in PAGE_PARTS]
    return template.substitute(
        escaped,
        # At the address /llm, a browser would look for the page's relative addresses beside /llm, not below it.
        base=f'<base href="{html.escape(root_path)}/">' if root_path else "",
        style="\n".join((_read("chat_page/page.css"), viewer_style())),
        script="\n".join((viewer_script(), *page_script)),
    )


def conversations_at_once(seats: int, most_waiting: int) -> int:
    """Return the number of conversations that the page starts at once: they fill the batch, which has `seats`, and
    two or more wait in the queue. The queue's length `most_waiting` and `STARTERS` are bounds."""
    return max(1, min(seats + max(2, seats // 2), STARTERS, most_waiting))


def viewer_script() -> str:
    """Return the JavaScript that draws step traces."""
    return "\n".join(_read(f"viewer/{part}.js") for part in VIEWER_PARTS)


def viewer_style() -> str:
    """Return the viewer's style sheet."""
    return _read("viewer/viewer.css")


def _read(name: str) -> str:
    return resources.files("common.server.page").joinpath(name).read_text("utf-8")
