"""The project's folder, and the links of built pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Tags and attributes whose targets a browser loads with a page. `<a href>` is followed only by a click.
LOADED = {
    ("script", "src"),
    ("img", "src"),
    ("img", "srcset"),
    ("source", "src"),
    ("source", "srcset"),
    ("video", "src"),
    ("video", "poster"),
    ("audio", "src"),
    ("iframe", "src"),
    ("embed", "src"),
    ("object", "data"),
    ("link", "href"),
    ("image", "href"),
    ("use", "href"),
}


@dataclass
class Page:
    """An HTML file: its ids, its links, and the targets that it loads."""

    path: Path
    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)


class _Reader(HTMLParser):
    def __init__(self, page: Page) -> None:
        super().__init__()
        self.page = page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if not value:
                continue
            if name == "id" or (tag == "a" and name == "name"):
                self.page.ids.add(value)
            if tag == "a" and name == "href":
                self.page.links.append(value)
            if (tag, name) in LOADED and ("rel", "canonical") not in attrs:
                self.page.loaded.append(value)


def read_page(path: Path) -> Page:
    page = Page(path)
    _Reader(page).feed(path.read_text(encoding="utf-8"))
    return page
