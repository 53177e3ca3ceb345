"""The site, built once for a test run, and small tools to look into it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: What a browser fetches by itself when it shows a page. `<a href>` is not among them: nobody follows it unasked.
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
    """An HTML file, read as far as links go."""

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


def said(log: str) -> str:
    """The lines of a build's log that tell why it failed."""
    return "\n".join(line for line in log.splitlines() if not line.startswith("INFO"))[-4000:]


def read_page(path: Path) -> Page:
    page = Page(path)
    _Reader(page).feed(path.read_text(encoding="utf-8"))
    return page


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site, unless BUILT_SITE names a folder with it. A warning fails the build, and so every test."""
    if built := os.environ.get("BUILT_SITE"):
        return Path(built)
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, said(done.stderr)
    return out


@pytest.fixture(scope="session")
def pages(site: Path) -> dict[Path, Page]:
    return {path: read_page(path) for path in sorted(site.rglob("*.html"))}
