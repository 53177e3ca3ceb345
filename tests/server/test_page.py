"""The page at `/`: what it says, and, in a real browser, that its form chats and streams completions."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.phases import find_phase
from common.server.page import render_page
from tests.browser import DESKTOP, PHONE, Tab
from tests.server.support import ServerProcess, eventually

ROOT = Path(__file__).resolve().parents[2]


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


def test_the_log_says_that_there_is_a_page(server: ServerProcess) -> None:
    (ready,) = [line for line in server.log if "ready: " in line]
    assert ready.rstrip().endswith(f" serves {server.model} at {server.url} (open it in a browser)")


def test_it_loads_nothing_from_elsewhere(server: ServerProcess) -> None:
    response = server.client.get("/")
    assert "//" not in response.text.replace("</", "")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    for link in re.findall(r'href="(?!data:)([^"]+)"', response.text):
        assert server.client.get(f"/{link}").status_code == 200


def test_a_models_name_cannot_be_markup() -> None:
    package = find_phase("phase5_continuous")
    phase = package.PHASE
    tokenizer = SimpleNamespace(chat_template=None)
    engine = SimpleNamespace(phase=phase, max_seq_len=64, config=package.Config(), tokenizer=tokenizer)
    page = render_page(engine, '<script>"&$idea', live_view=True)
    assert "&lt;script&gt;&quot;&amp;$idea" in page
    assert 'value="63"' in page, "no more than fits"


# ---------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def chatty() -> Iterator[ServerProcess]:
    """A server of a model that has a chat template."""
    with ServerProcess("phase5_continuous") as process:
        yield process


#: Keeps the bodies that the page posts and the statuses that it shows.
RECORDER = """(() => {
    window.sent = [];
    window.said = [];
    const post = window.fetch, status = document.getElementById("status");
    window.fetch = (path, options) => {
        if (options.body) sent.push([path, JSON.parse(options.body)]);
        return post(path, options);
    };
    new MutationObserver(() => said.push(status.textContent)).observe(status, { childList: true });
})()"""


def opened(tab: Tab, server: ServerProcess, **how: int | bool) -> None:
    tab.open(server.url, **how)  # type: ignore[arg-type]  # the words that `open` takes
    tab.ask(RECORDER)


def write(tab: Tab, text: str | None = None, **settings: float) -> None:
    """Fill in the form and send it."""
    if text is not None:
        tab.ask(f"document.getElementById('prompt').value = {text!r}")
    for name, value in settings.items():
        tab.ask(f"document.getElementById('{name}').value = {value}")
    tab.ask("document.getElementById('send').click()")


def ended(tab: Tab) -> str:
    """Wait until no answer is open. Return the last status."""
    tab.until(
        "document.getElementById('stop').disabled && document.getElementById('status').textContent !== ''"
    )
    status: str = tab.ask("document.getElementById('status').textContent")
    return status


def texts(tab: Tab, selector: str) -> list[str]:
    found: list[str] = tab.ask(f"[...document.querySelectorAll({selector!r})].map(each => each.textContent)")
    return found


@pytest.mark.browser
@pytest.mark.parametrize(("width", "dark"), [(DESKTOP, False), (PHONE, True)], ids=["desk", "phone at night"])
def test_a_model_with_a_chat_template_chats(tab: Tab, chatty: ServerProcess, width: int, dark: bool) -> None:
    opened(tab, chatty, width=width, dark=dark)
    write(tab)
    assert re.fullmatch(r"1 answer: \d+ tokens in [\d.]+ s, \d+ tokens/s", ended(tab))
    assert tab.ask("[...new Set(said)].slice(0, 2)") == ["waiting for the first token", "writing:"]
    (answer,), (about,) = texts(tab, ".made"), texts(tab, ".about")
    assert "Nora" in answer
    assert re.fullmatch(r"\d+ tokens in .*, the first after \d+ ms\. The model ended its answer\.", about)
    above_the_fold = 600  # pixels of a phone's 844
    assert tab.ask("document.querySelector('.made').getBoundingClientRect().top") < above_the_fold
    assert tab.ask("document.documentElement.scrollWidth") <= width
    labelled = "[...document.querySelectorAll('input, textarea')].every(e => e.labels.length || e.ariaLabel)"
    assert tab.ask(labelled)

    write(tab, "What is Nora?", temperature=0)
    ended(tab)
    paths = tab.ask("sent.map(each => each[0])")
    assert paths == ["v1/chat/completions"] * 2
    roles = tab.ask("sent[1][1].messages.map(each => each.role)")
    assert roles == ["user", "assistant", "user"]
    assert tab.ask("sent[1][1].messages[1].content") == answer
    assert texts(tab, ".given")[0] == "What is Nora?", "the newest answer stands under the form"

    tab.point("#anew", click=True)
    write(tab, "Hello!", copies=2)
    ended(tab)
    assert tab.ask("sent[2][1].messages.length") == 1
    assert len(texts(tab, ".answer")) == 4
    tab.assert_well(chatty.url)
    assert tab.violations("body") == []


@pytest.mark.browser
def test_an_answer_that_was_cut_says_so(tab: Tab, chatty: ServerProcess) -> None:
    opened(tab, chatty)
    write(tab, max_tokens=5)
    ended(tab)
    (about,) = texts(tab, ".about")
    assert about.endswith("Cut at 5 tokens.")


@pytest.mark.browser
def test_six_stories_are_one_click(tab: Tab, chatty: ServerProcess) -> None:
    opened(tab, chatty, width=PHONE)
    tab.point("#stories", click=True)
    assert ended(tab).startswith("6 answers: ")
    assert len(set(texts(tab, ".given"))) == 6
    assert all(len(each) > 20 for each in texts(tab, ".made"))
    (prompts,) = tab.ask("sent.map(each => each[1].prompt)")
    assert len(prompts) == 6, "all in one stream"


@pytest.mark.browser
def test_a_model_without_a_chat_template_continues_text(tab: Tab, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(ROOT / "common/zoo/llama-tiny", folder, ignore=shutil.ignore_patterns("chat_template*"))
    with ServerProcess("phase5_continuous", "--model", str(folder)) as server:
        opened(tab, server)
        write(tab, max_tokens=20, temperature=0)
        ended(tab)
        assert tab.ask("sent.map(each => each[0])") == ["v1/completions"]
        assert texts(tab, ".given") == ["Once there was a young owl named Nora."]
        (about,) = texts(tab, ".about")
        assert about.endswith("Cut at 20 tokens.")
        tab.assert_well(server.url)


@pytest.mark.browser
def test_stop_gives_the_request_up(tab: Tab, chatty: ServerProcess) -> None:
    opened(tab, chatty, width=PHONE)
    before = chatty.counters()["requests_cancelled"]
    write(tab, copies=4, max_tokens=1000)
    tab.until("document.querySelector('.made')?.textContent.length > 5")
    tab.point("#stop", click=True)
    assert ended(tab) == "stopped"
    eventually(lambda: chatty.counters()["requests_cancelled"] > before)
    write(tab, "Hello!", copies=1, max_tokens=5)
    assert ended(tab).startswith("1 answer: ")


@pytest.mark.browser
def test_a_refusal_is_shown_once_and_the_message_stays(tab: Tab, chatty: ServerProcess) -> None:
    opened(tab, chatty, width=PHONE)
    message = "word " * 5000
    write(tab, message)
    refusal = ended(tab)
    assert refusal.startswith("the prompt has ")
    assert tab.ask(f"document.body.innerText.split({refusal!r}).length") == 2
    assert texts(tab, ".answer") == []
    assert tab.ask("document.getElementById('prompt').value") == message
    write(tab, "Hello!", max_tokens=5)
    assert ended(tab).startswith("1 answer: ")


# ---------------------------------------------------------------------- live, over a real server


@pytest.fixture(scope="module")
def live() -> Iterator[ServerProcess]:
    """A server that wants a key, as the strictest do."""
    with ServerProcess(
        "phase7_chunked",
        *("--max-seq-len", "512", "--max-batch-size", "4", "--num-blocks", "64"),
        env={"INFER_API_KEY": "a-key"},
        headers={"Authorization": "Bearer a-key"},
    ) as process:
        yield process


def give_key(tab: Tab) -> None:
    tab.until("!document.getElementById('keyed').hidden")
    tab.ask(
        "(key => { key.value = 'a-key'; key.dispatchEvent(new Event('change')); })(document.getElementById('key'))"
    )
    tab.until("document.querySelector('.sv-head') !== null")


def send(tab: Tab, count: int, tokens: int) -> None:
    tab.ask(
        "document.getElementById('prompt').value = 'Tell me about a fox.'; "
        f"document.getElementById('copies').value = {count}; "
        f"document.getElementById('max_tokens').value = {tokens}; document.getElementById('send').click()"
    )


@pytest.mark.browser
@pytest.mark.parametrize(("width", "dark"), [(DESKTOP, False), (PHONE, True)], ids=["desk", "phone at night"])
def test_requests_are_seen_sharing_the_steps(tab: Tab, live: ServerProcess, width: int, dark: bool) -> None:
    tab.open(live.url, width=width, dark=dark)
    tab.until("!document.getElementById('keyed').hidden")
    assert tab.ask("document.body.innerText.split('wants a key').length") == 2, "it is said once"
    tab.errors.clear()  # that one request was refused
    give_key(tab)
    send(tab, 6, 240)
    tab.until("document.querySelectorAll('.sv-chip').length > 4")  # four seats, and who waits
    tab.until(
        "[...document.querySelectorAll('.sv-chip span')].some(each => each.textContent.startsWith('…'))"
    )
    assert re.search(r" running, \d waiting · ", texts(tab, ".sv-head span")[0])
    assert "blocks" in tab.until("document.querySelector('.sv-memory-head').textContent")
    tab.until("document.querySelectorAll('.answer b:not([hidden])').length === 6")
    letters = tab.ask("[...document.querySelectorAll('.answer b')].map(each => each.textContent)")
    assert len(set(letters)) == 6
    tab.until("document.getElementById('stop').disabled && !document.querySelector('.sv-chip')")
    assert tab.ask("document.querySelector('.sv-head span').textContent").endswith("6 done")
    explained = set(texts(tab, ".sv-legend span:not([hidden])"))
    assert {"prompt tokens", "one new token"} <= explained
    assert not any("found" in each or "kept" in each for each in explained), "this phase shares no memory"
    ends = tab.ask("[...document.querySelectorAll('.answer .about')].map(each => each.textContent)")
    assert all(" tokens/s, the first after " in each for each in ends)

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
    with ServerProcess("phase5_continuous", "--no-live-view") as server:
        tab.open(server.url)
        assert "--no-live-view" in tab.until("document.getElementById('live-status').textContent")
        send(tab, 1, 5)
        tab.until("document.querySelector('.answer .about').textContent.endsWith('Cut at 5 tokens.')")
        assert not any(each.endswith("/steps") for each in tab.requested)
        tab.assert_well(server.url)


@pytest.mark.browser
def test_of_a_large_memory_only_the_used_blocks_are_drawn_large(tab: Tab, chatty: ServerProcess) -> None:
    opened(tab, chatty)
    frame = {"step": 0, "start": 0, "took": 1, "key": True, "memory": [2000, 16], "kept": [[7, 8], []]}
    frame |= {"requests": [[0, "one", 33, 9]], "tables": [[0, 0, 1, 900, 1999]]}
    frame |= {"running": [[0, 0, 33, "p", 0, 33, 0]]}
    header = {"format": "infer-steps", "version": 1, "phase": [8, "x"], "seats": 2, "max_seq_len": 64}
    trace = json.dumps({"header": header, "frames": [frame]})
    tab.ask("document.body.append(globalThis.box = document.createElement('div'))")
    tab.ask(f"new StepViewer(box).show([{trace}])")
    boxes = "(look => box.querySelector('.sv-memory .' + look)?.getAttribute('d').split('M').length - 1)"
    counts = {look: tab.ask(f"{boxes}('{look}')") for look in ("sv-held", "sv-in-use", "sv-kept", "sv-free")}
    assert counts == {"sv-held": 3, "sv-in-use": 1, "sv-kept": 1, "sv-free": 1}, "three squares, and a bar"
    assert tab.ask("box.querySelector('.sv-memory svg').getBoundingClientRect().height") < 60
    assert "".join(texts(tab, "body > div .sv-memory text")) == "AAA"
    explained = texts(tab, "body > div .sv-legend span:not([hidden])")
    assert [each.split(":")[0] for each in explained] == ["prompt tokens", "kept"]
    tab.assert_well(chatty.url)
