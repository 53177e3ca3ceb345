"""The page at `/`: what it says, and, in a real browser, that its form streams a completion."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvicorn
from fastapi import Request
from fastapi.responses import HTMLResponse

from common.phases import find_phase
from common.server.app import create_app
from common.server.page import render_page
from tests.browser import CHROMIUM, DESKTOP, PHONE, Tab, new_tab
from tests.docs.test_browser import Record, browse
from tests.server.support import HANG_S, ServerProcess, eventually


def test_the_printed_address_shows_what_runs_there(server: ServerProcess, phase: str) -> None:
    response = server.client.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    about = find_phase(phase).PHASE
    for each in (
        about.title.lower(),
        about.idea,
        f"phase {about.number}",
        server.model,
        "1024 tokens",
        'max="1023"',
    ):
        assert each in response.text
    assert server.complete()["usage"]["completion_tokens"] > 0


def test_it_loads_nothing_from_elsewhere(server: ServerProcess) -> None:
    response = server.client.get("/")
    assert "//" not in response.text.replace("</", "")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    for link in re.findall(r'href="(?!data:)([^"]+)"', response.text):
        assert server.client.get(f"/{link}").status_code == 200


def test_a_models_name_cannot_be_markup() -> None:
    package = find_phase("phase5_continuous")
    phase = package.PHASE
    engine = SimpleNamespace(phase=phase, max_seq_len=64, config=package.Config())
    page = render_page(engine, '<script>"&$idea', live_view=True)
    assert "&lt;script&gt;&quot;&amp;$idea" in page
    assert 'value="63"' in page, "no more than fits"


# ---------------------------------------------------------------------- in a browser

#: Shows the page in a frame, uses its form, and posts what came of it (see `tests/docs/test_browser.py`).
PROBE = """<!doctype html><title>probe</title>
<iframe id="frame" style="border:0;width:WIDTHpx;height:900px" src="/"></iframe>
<img src="/__hold">
<script>
  const frame = document.getElementById("frame");
  const errors = [];
  let stopped = false;
  const made = () => frame.contentDocument.querySelector(".made");
  const find = id => frame.contentDocument.getElementById(id);
  function look() {
    const page = frame.contentDocument, status = find("status").textContent;
    if ("ACTION" === "stop" && !stopped && made().textContent.length > 5) {
      stopped = true;
      find("stop").click();
    }
    if (!/ended|stopped/.test(status) && !find("status").classList.contains("error")) {
      setTimeout(look, 20);
      return;
    }
    fetch("/__found", {method: "POST", body: JSON.stringify({
      given: page.querySelector(".given").textContent,
      made: made().textContent,
      status,
      error: find("status").classList.contains("error"),
      idle: !find("complete").disabled && find("stop").disabled,
      unnamed: [...page.querySelectorAll("input, textarea")].filter(
        each => !each.labels.length && !each.ariaLabel).length,
      width: page.documentElement.scrollWidth,
      background: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
      errors,
    })});
  }
  frame.addEventListener("load", () => {
    frame.contentWindow.addEventListener("error", event => errors.push(String(event.message)));
    find("prompt").value = "PROMPT";
    find("max_tokens").value = "ACTION" === "stop" ? 4000 : 20;
    find("temperature").value = 0;
    find("complete").click();
    look();
  });
</script>"""


@pytest.fixture(scope="module")
def page() -> Iterator[SimpleNamespace]:
    """An app with the probe's routes, in a thread."""
    if CHROMIUM is None:
        pytest.skip("no chromium here")
    package = find_phase("phase5_continuous")
    engine = package.build_engine(package.Config(device="cpu", dtype="float32"))
    app, record = create_app(engine), Record(proxy="127.0.0.1:9")  # nothing listens there

    @app.get("/__probe/{width}/{action}")
    def probe(width: str, action: str) -> HTMLResponse:
        prompt = "word " * 5000 if action == "too long" else "Once upon a time"
        return HTMLResponse(PROBE.replace("WIDTH", width).replace("ACTION", action).replace("PROMPT", prompt))

    @app.get("/__hold")
    def hold() -> None:
        record.posted.wait(HANG_S)

    @app.post("/__found")
    async def found(request: Request) -> None:
        record.found = await request.json()
        record.posted.set()

    listener = socket.create_server(("127.0.0.1", 0))
    record.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    uvicorn_server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    thread = threading.Thread(target=lambda: asyncio.run(uvicorn_server.serve([listener])))
    thread.start()
    yield SimpleNamespace(record=record, engine=engine)
    uvicorn_server.should_exit = True
    thread.join(HANG_S)


@pytest.mark.browser
def test_the_form_streams_a_completion(page: SimpleNamespace, tmp_path: Path) -> None:
    backgrounds = set()
    for number, (width, dark) in enumerate(((PHONE, False), (DESKTOP, True))):
        found = browse(page.record, tmp_path / str(number), "complete", width=width, dark=dark)
        assert found["errors"] == []
        assert re.match(r"20 tokens, ended: length; the first came after \d+ ms", found["status"])
        assert (found["given"], found["error"], found["idle"]) == ("Once upon a time", False, True)
        assert len(found["made"]) > 20
        assert found["unnamed"] == 0
        assert found["width"] <= width
        backgrounds.add(found["background"])
    assert len(backgrounds) == 2


@pytest.mark.browser
def test_stop_gives_the_request_up(page: SimpleNamespace, tmp_path: Path) -> None:
    before = page.engine.telemetry.counters.requests_cancelled
    found = browse(page.record, tmp_path, "stop", width=PHONE)
    assert (found["status"], found["error"], found["idle"]) == ("stopped", False, True)
    eventually(lambda: page.engine.telemetry.counters.requests_cancelled == before + 1)


@pytest.mark.browser
def test_a_refusal_is_shown(page: SimpleNamespace, tmp_path: Path) -> None:
    found = browse(page.record, tmp_path, "too%20long", width=PHONE)
    assert found["status"].startswith("the prompt has ")
    assert (found["made"], found["error"], found["idle"]) == ("", True, True)


# ---------------------------------------------------------------------- live, over a real server


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with new_tab(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture(scope="module")
def live() -> Iterator[ServerProcess]:
    """A server that wants a key, as the strictest do."""
    process = ServerProcess(
        "phase7_chunked",
        *("--max-seq-len", "512", "--max-batch-size", "4", "--num-blocks", "64"),
        env={"INFER_API_KEY": "a-key"},
        headers={"Authorization": "Bearer a-key"},
    )
    yield process
    process.close()


def give_key(tab: Tab) -> None:
    tab.until("!document.getElementById('keyed').hidden")
    tab.ask(
        "(key => { key.value = 'a-key'; key.dispatchEvent(new Event('change')); })(document.getElementById('key'))"
    )
    tab.until("document.querySelector('.sv-head') !== null")


def send(tab: Tab, count: int, tokens: int) -> None:
    tab.ask(
        f"document.getElementById('copies').value = {count}; "
        f"document.getElementById('max_tokens').value = {tokens}; document.getElementById('complete').click()"
    )


@pytest.mark.browser
@pytest.mark.parametrize(("width", "dark"), [(DESKTOP, False), (PHONE, True)], ids=["desk", "phone at night"])
def test_requests_are_seen_sharing_the_steps(tab: Tab, live: ServerProcess, width: int, dark: bool) -> None:
    tab.open(live.url, width=width, dark=dark)
    tab.until("document.getElementById('live-status').textContent.includes('wants a key')")
    tab.errors.clear()  # that one request was refused
    give_key(tab)
    send(tab, 6, 240)
    tab.until("document.querySelectorAll('.sv-chip').length > 4")  # four seats, and who waits
    assert "blocks" in tab.until("document.querySelector('.sv-memory-head').textContent")
    tab.until("document.querySelectorAll('.answer b:not([hidden])').length === 6")
    letters = tab.ask("[...document.querySelectorAll('.answer b')].map(each => each.textContent)")
    assert len(set(letters)) == 6
    tab.until("document.getElementById('stop').disabled && !document.querySelector('.sv-chip')")
    assert tab.ask("document.querySelector('.sv-head span').textContent").endswith("6 done")
    ends = tab.ask("[...document.querySelectorAll('.answer .about')].map(each => each.textContent)")
    assert all(" tokens, ended: " in each for each in ends)

    tab.point("[data-do=back]", click=True)  # pauses: what comes is not shown until it is asked for
    shown = tab.ask("document.querySelector('.sv-head span').textContent")
    send(tab, 1, 5)
    tab.until("document.getElementById('stop').disabled")
    assert tab.ask("document.querySelector('.sv-head span').textContent") == shown
    tab.point("[data-do=last]", click=True)
    tab.until("document.querySelector('.sv-head span').textContent.endsWith('7 done')")
    assert tab.ask("document.documentElement.scrollWidth") <= width
    tab.assert_well(live.url)
    assert tab.violations("body") == []


@pytest.mark.browser
def test_a_server_without_the_view_says_so(tab: Tab) -> None:
    server = ServerProcess("phase5_continuous", "--no-live-view")
    try:
        tab.open(server.url)
        assert "--no-live-view" in tab.until("document.getElementById('live-status').textContent")
        send(tab, 1, 5)
        tab.until("document.querySelector('.answer .about').textContent.includes('ended: length')")
        assert not any(each.endswith("/steps") for each in tab.requested)
        tab.assert_well(server.url)
    finally:
        server.close()
