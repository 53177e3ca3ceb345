"""The built site: complete, consistent, and alone in the world."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from common.server import viewer
from tests.docs.conftest import ROOT, Page

pytestmark = pytest.mark.slow  # building it takes most of a minute

NOT_FOUND = "404.html"  # its links begin at the server's root, wherever that is


def test_every_page_of_the_sources_is_built(site: Path) -> None:
    sources = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    assert len(sources) > 10
    for source in sources:
        assert (site / source.with_suffix(".html")).is_file(), source


def test_tools_and_exercises_are_not_published(site: Path) -> None:
    assert list(site.rglob("*.py")) == []


def test_internal_links_and_anchors_resolve(site: Path, pages: dict[Path, Page]) -> None:
    broken = []
    count = 0
    for path, page in pages.items():
        if path.name == NOT_FOUND:
            continue
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            count += 1
            target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            if target.is_dir():
                target /= "index.html"
            if not target.is_relative_to(site.resolve()) or not target.is_file():
                broken.append(f"{path.relative_to(site)}: {link}")
            elif parts.fragment and target in pages and not _has(pages[target], unquote(parts.fragment)):
                broken.append(f"{path.relative_to(site)}: {link} (no such anchor)")
    assert broken == []
    assert count > 500


def _has(page: Page, anchor: str) -> bool:
    return anchor in page.ids or anchor.startswith("__")  # `__codelineno-…` are made by highlighting


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    foreign = [
        f"{path.relative_to(site)}: {url}"
        for path, page in pages.items()
        for url in page.loaded
        if urlsplit(url).netloc or urlsplit(url).scheme not in ("", "data")
    ]
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        for url in re.findall(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", text):
            address = "".join(url)
            foreign += [f"{sheet.relative_to(site)}: {address}"] * bool(re.match(r"(https?:)?//", address))
    assert foreign == []


def test_no_page_asks_for_a_library_that_the_theme_would_fetch(pages: dict[Path, Page]) -> None:
    """The theme's script fetches Mermaid from a CDN as soon as a page has such a diagram."""
    for path in pages:
        assert 'class="mermaid"' not in path.read_text(encoding="utf-8"), path


def test_pages_stay_light_on_a_phone(site: Path) -> None:
    heavy = {
        path.name: path.stat().st_size
        for path in site.glob("*.html")
        if path.stat().st_size > 400_000 and path.name != "ledger.html"
    }
    assert heavy == {}


def test_the_viewer_is_the_servers_own(site: Path) -> None:
    assert (site / "assets" / "viewer.js").read_text(encoding="utf-8") == viewer.script()
    assert (site / "assets" / "viewer.css").read_text(encoding="utf-8") == viewer.style()
