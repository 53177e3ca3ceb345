"""The built site: complete, consistent, and independent of other servers."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from common.server.page.page import viewer_script, viewer_style
from tests.docs.support import ROOT, Page

pytestmark = pytest.mark.slow  # building it takes most of a minute

NOT_FOUND = "404.html"  # its links begin at the server's root


def test_every_page_of_the_sources_is_built(site: Path) -> None:
    sources = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    assert len(sources) > 10
    for source in sources:
        assert (site / source.with_suffix(".html")).is_file(), source


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
    """The theme's script fetches Mermaid from a CDN if a page has a Mermaid diagram."""
    for path in pages:
        assert 'class="mermaid"' not in path.read_text(encoding="utf-8"), path


def test_the_viewer_is_the_servers_own(site: Path) -> None:
    assert (site / "assets" / "viewer.js").read_text(encoding="utf-8") == viewer_script()
    assert (site / "assets" / "viewer.css").read_text(encoding="utf-8") == viewer_style()


def test_a_site_that_knows_its_address_uses_it(tmp_path: Path) -> None:
    """The address has a path. Previews name a picture below it, and the 404 page links to it from any depth."""
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    (tmp_path / "docs" / "index.md").write_text('# A "title"\n\nSome `code` & "quotes".\n\nMore.\n')
    (tmp_path / "docs" / "deep" / "page.md").write_text("# Deep\n\nText.\n")
    config = load_config(
        str(ROOT / "mkdocs.yml"),
        docs_dir=str(tmp_path / "docs"),
        site_dir=str(tmp_path / "site"),
        site_url="https://docs.example/infer/",
        nav=[{"Start": "index.md"}, {"Deep": "deep/page.md"}],
        plugins=[],
        hooks=[],
    )
    build(config)
    start, deep = preview(tmp_path / "site/index.html"), preview(tmp_path / "site/deep/page.html")
    assert (start["og:title"], start["og:description"]) == ('A "title"', 'Some code & "quotes".')
    assert deep["og:url"] == "https://docs.example/infer/deep/page.html"
    assert start["og:image"] == deep["og:image"] == "https://docs.example/infer/assets/page.png"
    assert '<a href="/infer/index.html">start page</a>' in article(tmp_path / "site" / NOT_FOUND)


def preview(path: Path) -> dict[str, str]:
    """Return a page's metadata for programs that show a preview of it."""
    found = re.findall(r'<meta property="(og:\w+)" content="([^"]*)">', path.read_text(encoding="utf-8"))
    return {name: unescape(value) for name, value in found}


def article(path: Path) -> str:
    """Return a page's HTML without header, menu and footer."""
    return path.read_text(encoding="utf-8").partition("<article")[2].partition("</article>")[0]
