"""The site in a real browser: nothing fails to load, nothing leaves this machine, nothing is wider than a phone.

```text
chromium ──> 127.0.0.1: the site       every request is recorded with its status
        └──> anything else: a proxy    that records whom it was asked for and refuses
```

Each page is opened in a frame as wide as a phone. A script beside the frame looks at it and posts what it found. An
image that the server holds back until then keeps chromium from finishing early: no driver is needed. A site opened
from disk has no server; there the document is read when its scripts have had their time.
"""

from __future__ import annotations

import functools
import http.server
import json
import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.browser import CHROMIUM, DESKTOP, PHONE, Tab, new_tab

pytestmark = pytest.mark.browser

#: Chromium calls its maker now and then, whatever page it shows; no page has a reason to ask these hosts.
BROWSERS_OWN = {
    "accounts.google.com",
    "android.clients.google.com",
    "clients2.google.com",
    "content-autofill.googleapis.com",
    "mtalk.google.com",
    "optimizationguide-pa.googleapis.com",
    "safebrowsing.googleapis.com",
    "safebrowsingohttpgateway.googleapis.com",
    "update.googleapis.com",
    "www.google.com",
}

PROBE = """<!doctype html><title>probe</title>
<iframe id="frame" style="border:0;width:WIDTHpx;height:900px" src="PAGE"></iframe>
<img src="/__hold">
<script>
  const frame = document.getElementById("frame");
  const errors = [];
  let tries = 0;
  function look() {
    const view = frame.contentWindow, page = frame.contentDocument;
    const results = page.querySelectorAll(".md-search-result__item").length;
    tries += 1;
    if (tries < 5 || (view.location.search && !results && tries < 100)) {
      setTimeout(look, 200);
      return;
    }
    const wide = [...page.querySelectorAll(".md-content__inner > *")].filter(
      each => each.getBoundingClientRect().right > WIDTH + 1);
    fetch("/__found", {method: "POST", body: JSON.stringify({
      text: page.querySelector("article").innerText.length,
      width: page.documentElement.scrollWidth,
      wide: wide.map(each => each.outerHTML.slice(0, 120)),
      broken: [...page.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src),
      background: view.getComputedStyle(page.body).backgroundColor,
      results,
      errors,
    })});
  }
  frame.addEventListener("load", () => {
    frame.contentWindow.addEventListener("error", event => errors.push(String(event.message)));
    frame.contentDocument.querySelectorAll("img").forEach(image => { image.loading = "eager"; });
    look();
  });
</script>"""


@dataclass
class Record:
    """What was asked of the two servers."""

    url: str = ""
    proxy: str = ""
    served: list[tuple[str, int]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)
    posted: threading.Event = field(default_factory=threading.Event)


class SiteHandler(http.server.SimpleHTTPRequestHandler):
    record: Record

    def do_GET(self) -> None:
        if self.path == "/__hold":
            self.record.posted.wait(60)
            self.send_response(204)
            self.end_headers()
            return
        if not self.path.startswith("/__probe/"):
            super().do_GET()
            return
        _, _, width, page = self.path.split("/", 3)
        body = PROBE.replace("WIDTH", width).replace("PAGE", "/" + page).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.record.found = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.record.posted.set()
        self.send_response(204)
        self.end_headers()

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        self.record.served.append((self.path, int(code)))

    def log_message(self, *_: Any) -> None:
        pass


class RefusingProxy(http.server.BaseHTTPRequestHandler):
    record: Record

    def do_GET(self) -> None:
        self.record.refused.append(self.path)
        self.send_error(502)

    do_CONNECT = do_POST = do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def record(site: Path) -> Iterator[Record]:
    """Both servers, running."""
    if CHROMIUM is None:
        pytest.skip("no chromium here")
    record = Record()
    site_handler = type("Site", (SiteHandler,), {"record": record})
    proxy_handler = type("Proxy", (RefusingProxy,), {"record": record})
    servers = [
        http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), functools.partial(site_handler, directory=str(site))
        ),
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), proxy_handler),
    ]
    record.url, record.proxy = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield record
    for server in servers:
        server.shutdown()
        server.server_close()


def browse(record: Record, profile: Path, page: str, *, width: int, dark: bool = False) -> dict[str, Any]:
    """Open a page in a frame of this width: what the probe found in it."""
    record.found = {}
    record.posted.clear()
    done = chromium(
        record,
        profile,
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        f"{record.url}/__probe/{width}/{page}",
    )
    assert record.found, f"{page} did not load: {done.stderr[-2000:]}"
    return record.found


def chromium(record: Record, profile: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Open a page and write its document, as scripts left it, to stdout."""
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-default-apps",
        "--disable-sync",
        "--disable-domain-reliability",
        "--disable-client-side-phishing-detection",
        f"--proxy-server={record.proxy}",  # loopback addresses do not go through it
        f"--user-data-dir={profile}",
        "--window-size=1400,1000",
        "--dump-dom",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def names(site: Path) -> list[str]:
    return [str(path.relative_to(site)) for path in sorted(site.rglob("*.html")) if path.name != "404.html"]


@pytest.mark.timeout(900)  # a browser for each of many pages
def test_every_page_loads_whole_and_fits_a_phone(record: Record, names: list[str], tmp_path: Path) -> None:
    assert len(names) > 10
    for name in names:
        found = browse(record, tmp_path, name, width=PHONE)
        assert found["errors"] == [], name
        assert found["broken"] == [], name
        assert found["text"] > 100, name
        assert found["width"] <= PHONE, f"{name} is {found['width']} wide"
        assert found["wide"] == [], name
    _assert_at_home(record)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with new_tab(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


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


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_copy_button_is_seen_and_covers_no_letters(tab: Tab, site: Path, dark: bool) -> None:
    tab.open((site / "phases/paged.html").as_uri(), width=PHONE, dark=dark)
    tab.until("document.querySelector('.md-code__button') !== null")
    found = tab.ask(
        """(block => {
            const [code, nav] = [block.querySelector("code"), block.querySelector(".md-code__nav")];
            code.scrollLeft = 9999;
            const letters = document.createRange();
            letters.selectNodeContents(code);
            const style = (element, name) => getComputedStyle(element)[name];
            return {
                letters: Math.max(...[...letters.getClientRects()].map(each => each.right)),
                button: nav.getBoundingClientRect().left,
                paper: [style(nav, "backgroundColor"), style(code, "backgroundColor")],
                ink: [style(nav.firstElementChild, "color"), style(document.querySelector("h1"), "color")],
            };
        })(document.querySelector(".highlight"))"""
    )
    assert found["letters"] <= found["button"]
    assert found["paper"][0] == found["paper"][1], "letters below it are hidden, not mixed with it"
    assert found["ink"][0] == found["ink"][1], "as strong as a heading's letters, without a pointer over it"


def test_search_finds_something_without_a_network(record: Record, tmp_path: Path) -> None:
    found = browse(record, tmp_path, "index.html?q=padding", width=DESKTOP)
    assert found["results"] > 0
    _assert_at_home(record)


def test_search_finds_something_in_a_site_opened_from_disk(
    record: Record, site: Path, tmp_path: Path
) -> None:
    for page in ("index.html", "phases/paged.html"):
        # Ten seconds by the page's own clock, which chromium puts forward when nothing else is due.
        done = chromium(
            record, tmp_path, "--virtual-time-budget=10000", f"{(site / page).as_uri()}?q=padding"
        )
        found = re.findall(r'<a href="([^"]+)" class="md-search-result__link"', done.stdout)
        assert found, done.stderr[-2000:]
        assert all(link.startswith(site.as_uri()) for link in found)
    _assert_nothing_asked_of_others(record)


@pytest.mark.parametrize("asked", ["prefix+cache", "preemption", "chunked+prefill"])
def test_search_finds_the_guide_before_the_reference(
    record: Record, site: Path, tmp_path: Path, asked: str
) -> None:
    address = f"{(site / 'index.html').as_uri()}?q={asked}"
    done = chromium(record, tmp_path, "--virtual-time-budget=10000", address)
    found = re.findall(r'<a href="([^"]+)" class="md-search-result__link"', done.stdout)
    assert found, done.stderr[-2000:]
    assert "/reference/" not in found[0]
    assert "/ledger.html" not in found[0]


def test_light_and_dark_follow_the_reader(record: Record, tmp_path: Path) -> None:
    light, dark = (
        browse(record, tmp_path / str(d), "index.html", width=DESKTOP, dark=d) for d in (False, True)
    )
    assert light["background"] != dark["background"]


def test_a_page_that_loads_from_elsewhere_would_be_noticed(
    record: Record, site: Path, tmp_path: Path
) -> None:
    page = '<!doctype html><article>x</article><img src="http://cdn.invalid/x.png">'
    (site / "elsewhere.html").write_text(page)
    try:
        found = browse(record, tmp_path, "elsewhere.html", width=PHONE)
    finally:
        (site / "elsewhere.html").unlink()
    assert found["broken"] == ["http://cdn.invalid/x.png"]
    assert "http://cdn.invalid/x.png" in record.refused
    record.refused.clear()


def _assert_nothing_asked_of_others(record: Record) -> None:
    hosts = {urlsplit(target if "://" in target else f"//{target}").hostname for target in record.refused}
    assert hosts <= BROWSERS_OWN


def _assert_at_home(record: Record) -> None:
    _assert_nothing_asked_of_others(record)
    failed = [(path, status) for path, status in record.served if status >= 400 and path != "/favicon.ico"]
    assert failed == []
    assert record.served
