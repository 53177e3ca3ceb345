"""Hooks that mkdocs calls while it builds the site.

They add the viewer and the stepper's traces, rank pages in the search, link the glossary, and show the switch
between versions.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # mkdocs loads this file by itself, before it loads macros

from common.server.page.page import viewer_script, viewer_style  # noqa: E402 - needs the path
from docs.building import stepper, terms  # noqa: E402

LINKED = ("The course", "Ideas", "Using it")  # sections whose pages link words to the glossary
DEFINING = ("glossary.md", "metrics.md")
RANKED_LAST = ("reference/", "ledger.md")
LAST = 0.001  # a word in a title counts a thousand times, and the reference is full of titles


def on_config(config: MkDocsConfig) -> None:
    """Show the switch between versions if mike builds the site. A site by `make docs` has only one version."""
    if "MIKE_DOCS_VERSION" in os.environ:
        config.extra["version"] = {"provider": "mike"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, content in (("viewer.js", viewer_script()), ("viewer.css", viewer_style())):
        files.append(File.generated(config, f"assets/{name}", content=content))
    for setting in stepper.settings():
        files.append(
            File.generated(config, f"assets/steps/{setting.name}.js", content=stepper.script(setting))
        )
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Rank the reference and the ledger below the guide in the search: they have every word of the guide."""
    if page.file.src_uri.startswith(RANKED_LAST):
        page.meta["search"] = {"boost": LAST}
    return markdown


def on_page_content(html: str, page: Page, **_: object) -> str:
    """Give the entries of the pages `DEFINING` anchors. On pages of the sections `LINKED`, link to the entries."""
    if page.file.src_uri in DEFINING:
        return terms.with_anchors(html)
    if page.parent is not None and page.parent.title in LINKED:
        return terms.linked(html, "../" * page.file.src_uri.count("/"))
    return html
