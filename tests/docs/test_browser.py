"""The site in a real browser: everything loads, only from the site itself, and fits the width of a phone."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import PHONE, Tab

pytestmark = pytest.mark.browser

#: Makes the browser load every image, even far below. Returns the addresses of images that it could not load.
BROKEN = """Promise.all([...document.images].map(image => {
  image.loading = "eager";
  return image.decode().then(() => [], () => [image.src]);
})).then(found => found.flat())"""

#: Returns the HTML of a page's parts that are wider than a phone, cut to its beginning.
WIDE = f"""[...document.querySelectorAll(".md-content__inner > *")]
  .filter(each => each.getBoundingClientRect().right > {PHONE + 1})
  .map(each => each.outerHTML.slice(0, 120))"""


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def home(site: Path) -> Iterator[str]:
    """The address of the site on a server for these tests."""
    handler = functools.partial(_Handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.timeout(900)  # dozens of pages
def test_every_page_loads_whole_and_fits_a_phone(tab: Tab, site: Path, home: str) -> None:
    names = [str(path.relative_to(site)) for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    assert len(names) > 10
    for name in names:
        tab.open(f"{home}/{name}", width=PHONE)
        assert tab.ask(BROKEN) == [], name
        assert tab.ask("document.querySelector('article').innerText.length") > 100, name
        assert tab.ask("document.documentElement.scrollWidth") <= PHONE, name
        assert tab.ask(WIDE) == [], name
        tab.assert_well(home)


@pytest.mark.parametrize("name", ["options", "benchmarks", "constrained", "phases/model", "phases/pipelined"])
def test_a_wide_table_scrolls_on_a_phone_and_its_first_column_stays(tab: Tab, site: Path, name: str) -> None:
    tab.open((site / f"{name}.html").as_uri(), width=PHONE)
    tab.until("document.querySelector('.md-typeset__scrollwrap') !== null")
    tab.ask("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    tables = tab.ask(
        "[...document.querySelectorAll('.md-typeset__scrollwrap')].map(wrap => { wrap.scrollLeft = 9999;"
        " const cells = [...wrap.querySelectorAll('tr > :first-child')].map(each => each.getBoundingClientRect());"
        " return [Math.min(...cells.map(each => each.left)), Math.max(...cells.map(each => each.right))]; })"
    )
    assert tables
    for left, right in tables:
        assert left >= 0
        assert right <= PHONE / 2
    assert tab.ask("document.documentElement.scrollWidth") == PHONE


RESULTS = "[...document.querySelectorAll('.md-search-result__link')].map(each => each.href)"


def found(tab: Tab, address: str) -> list[str]:
    """Return the links that a search finds."""
    tab.open(address)
    tab.until(f"{RESULTS}.length")
    links: list[str] = tab.ask(RESULTS)
    return links


def test_search_finds_something_without_a_network(tab: Tab, home: str) -> None:
    assert all(link.startswith(home) for link in found(tab, f"{home}/index.html?q=padding"))
    tab.assert_well(home)


@pytest.mark.parametrize("page", ["index.html", "phases/paged.html"])
def test_search_finds_something_in_a_site_opened_from_disk(tab: Tab, site: Path, page: str) -> None:
    links = found(tab, f"{(site / page).as_uri()}?q=padding")
    assert all(link.startswith(site.as_uri()) for link in links)
    tab.assert_well(site.as_uri())
