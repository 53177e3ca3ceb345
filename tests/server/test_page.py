"""The page at `/`: its text, and, in a real browser, its conversations beside the engine's steps."""

from __future__ import annotations

import html
import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.request import SamplingParams
from common.server.page.page import render_page
from common.startup.phases import find_phase
from tests.support.browser import DESKTOP, PHONE, Tab
from tests.support.servers import LocalServer, ServerProcess, eventually, rendered

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
    ):
        assert html.escape(each) in response.text
    assert 'max="1023"' in response.text
    assert server.complete()["usage"]["completion_tokens"] > 0


def test_the_log_says_that_there_is_a_page(server: ServerProcess) -> None:
    (ready,) = [line for line in server.log if "ready: " in line]
    assert ready.rstrip().endswith(f" serves {server.model} at {server.url} (open it in a browser)")


def test_it_loads_nothing_from_elsewhere(server: ServerProcess) -> None:
    response = server.client.get("/")
    assert "//" not in response.text.replace("</", "")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in response.headers["content-security-policy"]
    for link in re.findall(r'href="(?!data:)([^"]+)"', response.text):
        assert server.client.get(f"/{link}").status_code == 200


def test_a_models_name_cannot_be_markup() -> None:
    package = find_phase("phase5_continuous")
    facts = SimpleNamespace(
        phase=package.PHASE,
        max_seq_len=64,
        config=package.Config(),
        default_params=SamplingParams(temperature=0.3),
    )
    maker = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=None))
    page = render_page(SimpleNamespace(facts=facts, maker=maker), '<script>"&$idea', live_view=True)
    assert "&lt;script&gt;&quot;&amp;$idea" in page
    assert 'max="63" value="32"' in page, "half of what fits"
    assert 'placeholder="0.3"' in page, "the model's own temperature is the default"


# ---------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def chatty() -> Iterator[ServerProcess]:
    """A server of a model that has a chat template."""
    with ServerProcess("phase5_continuous") as process:
        yield process


@pytest.fixture(scope="module")
def slow() -> Iterator[LocalServer]:
    """A server with two seats, whose steps take so long that the page shows each of them."""
    with LocalServer("phase8_prefix", max_batch_size=2, max_seq_len=512) as server:
        server.engine.watchers.append(lambda *_: time.sleep(0.02))
        yield server


#: Records the bodies that the page posts.
RECORDER = """(() => {
    window.sent = [];
    const post = window.fetch;
    window.fetch = (path, options = {}) => {
        if (options.body) sent.push([path, JSON.parse(options.body)]);
        return post(path, options);
    };
})()"""


def opened(tab: Tab, server: Any, **how: Any) -> None:
    tab.open(server.url, **how)
    tab.ask(RECORDER)


def write(tab: Tab, text: str, **settings: float | str) -> None:
    """Fill in settings and a message, and press Enter."""
    for name, value in settings.items():
        tab.ask(f"document.getElementById({name!r}).value = {value!r}")
    tab.ask("document.getElementById('prompt').value = ''; document.getElementById('prompt').focus()")
    tab.type(text)
    tab.press("Enter")


def answered(tab: Tab) -> str:
    """Wait until the answer in the shown conversation has ended. Return its last line."""
    tab.ask(
        "new Promise(resolve => requestAnimationFrame(() => setTimeout(resolve)))"
    )  # until the message is drawn
    tab.until("document.getElementById('stop').hidden && document.querySelectorAll('.turn').length")
    about: str = tab.ask("document.querySelector('.turn:last-of-type .about').textContent")
    return about


def texts(tab: Tab, selector: str) -> list[str]:
    found: list[str] = tab.ask(f"[...document.querySelectorAll({selector!r})].map(each => each.textContent)")
    return found


def messages(tab: Tab, request: int) -> list[dict[str, str]]:
    """The messages of a request that the page has sent."""
    found: list[dict[str, str]] = tab.ask(f"sent[{request}][1].messages")
    return found


def joined(text: str) -> str:
    """Return a text without white space, some of which the page turns into paragraphs."""
    return "".join(text.split())


FIGURES = re.compile(
    r"Done\. (\d+) tokens, \d+ tokens/s, the first after [\d.]+ m?s\. Prompt: (\d+) tokens, (\d+) cached\."
)


@pytest.mark.browser
def test_a_conversation_remembers_what_was_said(tab: Tab, slow: LocalServer) -> None:
    opened(tab, slow)
    write(tab, "Tell me a story about an owl named Nora.", system="You tell stories.", seed=5)
    first = FIGURES.fullmatch(answered(tab))
    assert first is not None
    (answer,) = texts(tab, ".answer")
    assert "Nora" in answer
    write(tab, "What is Nora?", temperature=0, top_p=0.9, max_tokens=40)
    second = FIGURES.fullmatch(answered(tab))
    assert second is not None

    told = messages(tab, 1)
    assert [each["role"] for each in told] == ["system", "user", "assistant", "user"]
    assert told[0]["content"] == "You tell stories."
    assert joined(told[2]["content"]) == joined(answer)
    assert int(second[2]) == len(rendered(told, add_generation_prompt=True))
    assert int(second[3]) >= int(first[2]), "the first prompt was found in memory"
    assert tab.ask(
        "(({temperature, top_p, max_tokens, seed}) => [temperature, top_p, max_tokens, seed])(sent[1][1])"
    ) == [
        0,
        0.9,
        40,
        5,
    ]
    assert "top_p" not in tab.ask("sent[0][1]"), "an empty setting is the server's"

    tab.point("#new", click=True)
    write(tab, "Hello!", system="")
    answered(tab)
    assert messages(tab, 2) == [{"role": "user", "content": "Hello!"}]
    assert texts(tab, "#list .name") == ["Tell me a story about an owl named Nora.", "Hello!"]
    tab.assert_well(slow.url)


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["day", "night"])
@pytest.mark.parametrize("width", [DESKTOP, 900, 390, 320])
def test_conversations_at_once_are_seen_in_seats_and_blocks(
    tab: Tab, slow: LocalServer, width: int, dark: bool
) -> None:
    opened(tab, slow, width=width, dark=dark, height=844)
    tab.until("document.querySelector('.sv-head') !== null")
    tab.point("#load", click=True)
    tab.until("document.querySelectorAll('#list .open').length === 4")
    tab.until("document.querySelectorAll('.sv-chip').length === 4")
    tab.until(
        "[...document.querySelectorAll('.sv-chip b')].map(each => each.textContent).sort().join('') === 'ABCD'"
    )
    tab.until("document.querySelectorAll('.sv-chip.sv-waits').length === 2")
    tab.until(
        "[...document.querySelectorAll('#list .state')]"
        ".filter(each => each.textContent.startsWith('…')).length === 2"
    )
    running = tab.ask(
        "[...document.querySelectorAll('.sv-chip:not(.sv-waits) b')].map(each => each.textContent)"
    )
    colours = (
        "(selector => Object.fromEntries([...document.querySelectorAll(selector)]"
        ".map(each => [each.textContent, getComputedStyle(each).backgroundColor])))"
    )
    in_list, in_picture = tab.ask(f"[{colours}('#list .badge'), {colours}('.sv-chip:not(.sv-waits) b')]")
    assert {letter: in_list[letter] for letter in running} == in_picture
    assert set("".join(texts(tab, ".sv-memory text"))) <= {*"ABCD×234"}
    narrow = width < 800
    if narrow:
        assert [each for each in texts(tab, "#strip .badge") if each != "0"], "the seats stand above the form"
    assert tab.ask("document.documentElement.scrollWidth") <= width
    assert tab.ask("document.documentElement.scrollHeight") <= 844
    if narrow:
        tab.point("#strip", click=True)
        assert tab.ask("getComputedStyle(document.getElementById('talk')).display") == "none"
        assert tab.ask("document.documentElement.scrollWidth") <= width
        tab.ask("document.querySelector('.sv-chip').click()")
        assert tab.ask("getComputedStyle(document.getElementById('live')).display") == "none"
    (posted,) = [body for path, body in tab.ask("sent") if path == "v1/completions"]
    assert len({tuple(prompt) for prompt in posted["prompt"]}) == 4, "each is asked something else"
    assert slow.counters()["preemptions"] == 0
    tab.point("#stop-all", click=True)
    eventually(lambda: not slow.engine.scheduler.has_work)
    tab.until("!document.querySelector('#list .open')")
    tab.assert_well(slow.url)
    assert tab.violations("body") == []


@pytest.mark.browser
@pytest.mark.parametrize("way", ["Escape", "#stop", "#delete"])
def test_stop_frees_the_seat(tab: Tab, slow: LocalServer, way: str) -> None:
    opened(tab, slow)
    before = slow.counters()["requests_cancelled"]
    write(tab, "Tell me a story about an owl named Nora.")
    tab.point("#new", click=True)
    write(tab, "Tell me a story about a brave fox.")
    tab.until("document.querySelector('.answer')?.textContent.length > 5")
    eventually(lambda: len(slow.engine.scheduler.active) == 2)
    if way == "Escape":
        tab.press(way)
    else:
        tab.point(way, click=True)
    eventually(lambda: slow.counters()["requests_cancelled"] == before + 1)
    eventually(lambda: len(slow.engine.scheduler.active) == 1)
    if way != "#delete":
        assert answered(tab).startswith("Stopped. ")
        (cut,) = texts(tab, ".answer")
        write(tab, "Go on.", max_tokens=3)
        assert answered(tab).startswith("Cut at the limit. 3 tokens")
        assert joined(messages(tab, 2)[1]["content"]) == joined(cut), "what was read of the answer"
        tab.point("#list li:first-child button", click=True)
    assert answered(tab).startswith("Done. ")


@pytest.mark.browser
def test_a_reload_keeps_conversations_and_settings(tab: Tab, slow: LocalServer) -> None:
    opened(tab, slow)
    write(tab, "Tell me a story about an owl named Nora.", system="You tell stories.", temperature=0.5)
    answered(tab)
    (answer,) = texts(tab, ".answer")
    tab.point("#new", click=True)
    write(tab, "Tell me a story about a brave fox.")
    tab.until("document.querySelector('.answer')?.textContent.length > 5")
    kept = "Object.values(localStorage).filter(each => JSON.parse(each).turns?.[0]?.text).length === 2"
    tab.until(kept)
    tab.reload()
    tab.ask(RECORDER)
    assert tab.until("document.querySelector('.turn .about')?.textContent").startswith("Broken off. ")
    assert tab.ask(
        "[document.getElementById('temperature').value, document.getElementById('system').value]"
    ) == [
        "0.5",
        "You tell stories.",
    ]
    tab.point("#list li:first-child button", click=True)
    tab.until(f"document.querySelector('.answer')?.textContent === {json.dumps(answer)}")
    write(tab, "What is Nora?", max_tokens=64)  # the story may have taken half of the context
    answered(tab)
    assert [each["role"] for each in messages(tab, 0)] == ["system", "user", "assistant", "user"]
    eventually(lambda: not slow.engine.scheduler.has_work)
    tab.assert_well(slow.url)


@pytest.mark.browser
def test_a_new_tab_has_them_and_deleting_can_be_undone(tab: Tab, slow: LocalServer) -> None:
    opened(tab, slow)
    write(tab, "What does a fox like to eat?")
    answered(tab)
    (answer,) = texts(tab, ".answer")
    chats = "Object.entries(localStorage).filter(each => each[0].startsWith('infer-chat:'))"
    stored = f"{chats}.length"
    tab.until(f"{stored} === 1 && JSON.parse({chats}[0][1]).turns[0].end")
    tab.ask("sessionStorage.clear()")
    tab.reload()
    tab.until(f"document.querySelector('.answer')?.textContent === {json.dumps(answer)}")
    assert tab.ask("document.querySelector('.about').textContent").startswith("Done. ")

    for button, others in (("#delete", 0), ("#clear", 1)):
        if others:
            tab.point("#new", click=True)
            write(tab, "Where does an otter live?", max_tokens=5)
            answered(tab)
        tab.until(f"{stored} === {1 + others}")
        tab.point(button, click=True)
        tab.until(f"{stored} === 0 && !document.querySelector('.turn')")
        assert tab.ask("document.getElementById('notice').innerText") == (
            "2 conversations deleted. Undo" if others else "1 conversation deleted. Undo"
        )
        tab.point("#notice button", click=True)
        tab.until(f"{stored} === {1 + others} && document.querySelectorAll('.turn').length === 1")
        assert texts(tab, ".answer") == [answer]
        assert tab.ask("document.getElementById('notice').hidden")

    copy = tab.ask(f"JSON.parse({chats}[0][1])")
    copy["turns"][0] |= {"asked": "Asked elsewhere", "end": ""}
    event = "dispatchEvent(new StorageEvent('storage', {key: 'infer-chat:x', newValue: %s}))"
    tab.ask(event % json.dumps(json.dumps(copy)))
    tab.until("document.querySelectorAll('#list li').length === 3")
    tab.ask(
        "[...document.querySelectorAll('#list button')].find(each => each.innerText.includes('elsewhere')).click()"
    )
    tab.until("document.querySelector('.about').textContent.startsWith('Being written in another tab.')")
    tab.ask(event % "null")
    tab.until("document.querySelectorAll('#list li').length === 2")
    tab.assert_well(slow.url)


@pytest.mark.browser
def test_an_answer_can_be_copied_asked_again_edited_and_exported(tab: Tab, chatty: ServerProcess) -> None:
    opened(tab, chatty)
    tab.ask(
        "void (URL.createObjectURL = blob => { blob.text().then(text => { window.saved = text; }); return '#'; });"
        "document.addEventListener('copy', () => { window.copied = getSelection().toString(); })"
    )
    write(tab, "Tell me a story about an owl named Nora.", max_tokens=12, temperature=2)
    answered(tab)
    write(tab, "Why?", max_tokens=7)
    answered(tab)

    tab.point(".turn:last-child [data-act=again]", click=True)
    answered(tab)
    assert [each["content"] for each in messages(tab, 2)[::2]] == [
        "Tell me a story about an owl named Nora.",
        "Why?",
    ]
    assert len(texts(tab, ".turn")) == 2
    assert tab.ask("getComputedStyle(document.querySelector('[data-act=again]')).display") == "none", (
        "the last only"
    )

    tab.ask("document.getElementById('prompt').value = 'a draft'")
    tab.point(".turn:first-child [data-act=edit]", click=True)
    tab.until("!document.getElementById('editing').hidden")
    assert tab.ask("document.getElementById('prompt').value") == "Tell me a story about an owl named Nora."
    tab.press("Escape")
    assert tab.ask("document.getElementById('prompt').value") == "a draft"
    assert len(texts(tab, ".turn")) == 2
    tab.point(".turn:first-child [data-act=edit]", click=True)
    write(tab, "Tell me about a **fox**.")
    answered(tab)
    assert [each["content"] for each in messages(tab, 3)] == ["Tell me about a **fox**."]
    assert texts(tab, ".asked") == ["Tell me about a **fox**."]
    assert tab.ask("document.getElementById('prompt').value") == "a draft"

    (answer,) = texts(tab, ".answer")
    for clipboard in ("undefined", "{writeText: async text => { window.copied = text; }}"):
        tab.ask(f"Object.defineProperty(navigator, 'clipboard', {{value: {clipboard}, configurable: true}})")
        tab.ask("window.copied = ''")
        tab.point("[data-act=copy]", click=True)
        tab.until("copied && document.querySelector('[data-act=copy]').textContent === 'Copied'")
        assert joined(tab.ask("copied")) == joined(answer)
        tab.until("document.querySelector('[data-act=copy]').textContent === 'Copy'")
    tab.point("#export", click=True)
    exported = tab.until("window.saved")
    assert exported.startswith(f"**You:**\n\nTell me about a **fox**.\n\n**{chatty.model}:**\n\n")
    assert joined(answer) in joined(exported)
    tab.assert_well(chatty.url)
    assert tab.violations("body") == []


@pytest.mark.browser
def test_a_refusal_is_part_of_the_conversation(tab: Tab, chatty: ServerProcess) -> None:
    opened(tab, chatty, width=PHONE)
    write(tab, "Hello!", max_tokens=5)
    answered(tab)
    message = "word " * 5000
    write(tab, message)
    assert answered(tab) == "Failed."
    (refusal,) = [each for each in texts(tab, ".error") if each]
    assert refusal.startswith("prompt is too long: ")
    assert tab.ask("document.getElementById('prompt').value") == message, "to try again"
    assert tab.ask("document.documentElement.scrollWidth") <= PHONE
    write(tab, "What is Nora?")
    assert answered(tab).startswith("Cut at the limit. 5 tokens")
    assert len(messages(tab, 2)) == 3, "the message without an answer is left out"
    tab.errors.clear()  # that one request was refused
    assert tab.violations("body") == []


#: Answers each message with a stream of these deltas, as a reasoning model with tools might.
STAND_IN = """(deltas => {
    const post = window.fetch;
    window.fetch = (path, options) => {
        if (!options?.body) return post(path, options);
        const usage = { prompt_tokens: 9, completion_tokens: 3 };
        const data = deltas.map((delta, at) => JSON.stringify({ choices: [{ index: 0, delta,
            finish_reason: at === deltas.length - 1 ? "stop" : null }], usage }));
        const stream = [...data, "[DONE]"].map(each => `data: ${each}\\n\\n`).join("");
        return Promise.resolve(new Response(stream));
    };
})"""


@pytest.mark.browser
def test_reasoning_calls_and_code_are_shown_apart(tab: Tab, chatty: ServerProcess) -> None:
    tab.open(chatty.url)
    evil = '<img src="x" onerror="throw 1">'
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "The user "},
        {"reasoning_content": f"greets. {evil}"},
        {"content": f"Hello {evil}, **you**!\n\nRun `ls`:\n```sh\nls -l\n"},
        {"content": "\npwd\n```\nThat is **not closed, and `neither this."},
        {"tool_calls": [{"index": 0, "id": "call-1", "function": {"name": "weather", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Rome"}'}}]},
    ]
    tab.ask(f"({STAND_IN})({json.dumps(deltas)})")
    write(tab, f"Hello {evil}")
    answered(tab)
    assert texts(tab, ".thought") == [f"The user greets. {evil}"]
    assert tab.ask("document.querySelector('.turn details').open") is False
    assert texts(tab, ".answer p") == [
        f"Hello {evil}, you!",
        "Run ls:",
        "That is **not closed, and `neither this.",
    ]
    assert texts(tab, ".answer pre") == ["ls -l\n\npwd"]
    assert texts(tab, ".answer strong") == ["you"]
    assert texts(tab, ".calls p, .calls pre") == ["Calls the tool weather", '{"city": "Rome"}']
    assert texts(tab, ".asked") == [f"Hello {evil}"]
    assert tab.ask("document.querySelectorAll('img').length") == 0
    tab.assert_well(chatty.url)
    assert tab.violations("body") == []


@pytest.mark.browser
def test_a_model_without_a_chat_template_continues_text(tab: Tab, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(ROOT / "common/zoo/llama-tiny", folder, ignore=shutil.ignore_patterns("chat_template*"))
    with ServerProcess("phase5_continuous", "--model", str(folder)) as server:
        opened(tab, server)
        assert tab.ask("getComputedStyle(document.getElementById('system').parentElement).display") == "none"
        write(tab, "Once there was a young owl named Nora.", max_tokens=20, temperature=0)
        assert answered(tab).startswith("Cut at the limit. 20 tokens")
        write(tab, "Once there was a fox.")
        answered(tab)
        assert tab.ask("sent.map(each => [each[0], each[1].prompt])") == [
            ["v1/completions", "Once there was a young owl named Nora."],
            ["v1/completions", "Once there was a fox."],
        ]
        tab.assert_well(server.url)


# ---------------------------------------------------------------------- live, over a real server


@pytest.fixture(scope="module")
def live() -> Iterator[ServerProcess]:
    """A server that requires a key."""
    with ServerProcess(
        "phase7_chunked",
        *("--max-seq-len", "512", "--max-batch-size", "4", "--num-blocks", "64"),
        env={"INFER_API_KEY": "a-key"},
        headers={"Authorization": "Bearer a-key"},
    ) as process:
        yield process


#: The first stream of steps ends at once, as when the server is started again.
FIRST_STREAM_ENDS = r"""(() => {
    const ask = window.fetch;
    window.fetch = async (path, options) => {
        const response = await ask(path, options);
        if (path !== "steps" || !response.ok) return response;
        window.fetch = ask;
        return new Response("event: end\ndata: {}\n\n");
    };
})()"""

#: A key that ends the composition of an input method, as in Safari.
COMPOSED = "new KeyboardEvent('keydown', {key: 'Enter', keyCode: 229, bubbles: true})"


def give_key(tab: Tab) -> None:
    tab.until("!document.getElementById('keyed').hidden")
    tab.ask(
        "(key => { key.value = 'a-key'; key.dispatchEvent(new Event('change')); })(document.getElementById('key'))"
    )
    tab.until("document.querySelector('.sv-head') !== null")


def engine_line(tab: Tab) -> str:
    line: str = tab.ask("document.querySelector('.sv-head span').textContent")
    return line


@pytest.mark.browser
def test_a_server_with_keys_wants_one(tab: Tab, live: ServerProcess) -> None:
    tab.open(live.url)
    tab.until("!document.getElementById('keyed').hidden")
    assert tab.ask("document.body.innerText.split('wants a key').length") == 2, "it is said once"
    tab.ask(f"document.getElementById('prompt').dispatchEvent({COMPOSED})")
    assert tab.ask("document.querySelectorAll('.turn').length") == 0
    write(tab, "Hello!", max_tokens=5)
    assert answered(tab) == "Failed."
    assert tab.ask("document.getElementById('prompt').value") == "Hello!"
    tab.errors.clear()  # these requests were refused
    tab.ask(FIRST_STREAM_ENDS)
    give_key(tab)  # and the live view comes back
    tab.ask("document.getElementById('prompt').focus()")
    tab.press("Enter")
    assert answered(tab).startswith("Cut at the limit. 5 tokens")
    assert not tab.ask("JSON.stringify({ ...sessionStorage, ...localStorage })").count("a-key"), (
        "nobody keeps the key"
    )
    tab.assert_well(live.url)


@pytest.mark.browser
@pytest.mark.parametrize(("width", "dark"), [(DESKTOP, False), (PHONE, True)], ids=["desk", "phone at night"])
def test_the_picture_follows_the_engine_until_it_is_paused(
    tab: Tab, live: ServerProcess, width: int, dark: bool
) -> None:
    tab.open(live.url, width=width, dark=dark)
    give_key(tab)
    tab.errors.clear()  # that one request was refused
    tab.ask("document.querySelector('#views [data-view=engine]').click()")
    before = live.counters()["requests_finished"]
    tab.ask("document.getElementById('load').click()")
    eventually(lambda: live.counters()["requests_finished"] == before + 6)
    tab.until("!document.querySelector('#list .open') && !document.querySelector('.sv-chip')")
    assert engine_line(tab).endswith("6 done")
    assert "blocks" in tab.ask("document.querySelector('.sv-memory-head').textContent")
    explained = set(texts(tab, ".sv-legend span:not([hidden])"))
    assert {"prompt tokens", "one new token"} <= explained
    assert not any("found" in each or "kept" in each for each in explained), "this phase shares no memory"

    tab.point("[data-do=back]", click=True)  # pauses: new steps are not shown until the reader goes on
    shown = engine_line(tab)
    live.complete(max_tokens=5)
    tab.ask("new Promise(resolve => setTimeout(resolve, 300))")
    assert engine_line(tab) == shown
    tab.point("[data-do=last]", click=True)
    tab.until("document.querySelector('.sv-head span').textContent.endsWith('7 done')")
    assert tab.ask("document.documentElement.scrollWidth") <= width
    tab.assert_well(live.url)
    assert tab.violations("body") == []


@pytest.mark.browser
def test_blocks_on_disk_have_a_shade_of_their_own(tab: Tab, tmp_path: Path) -> None:
    with ServerProcess("phase11_tiered", "--kv-tier", str(tmp_path), "--kv-tier-bytes", str(2**24)) as server:
        tab.open(server.url)
        tab.ask("document.querySelector('#views [data-view=engine]').click()")
        server.complete(prompt="Once upon a time " * 20, max_tokens=30, ignore_eos=True)
        eventually(lambda: server.counters()["tier_written_bytes"] > 0)
        server.complete(max_tokens=5)
        tab.until("/[1-9]\\d* of \\d+ on disk/.test(document.querySelector('.sv-memory-head').textContent)")
        assert any(each.startswith("on disk") for each in texts(tab, ".sv-legend span:not([hidden])"))
        shades = [
            tab.ask(f"getComputedStyle(document.querySelector('.steps-viewer .sv-{look}')).fill")
            for look in ("disk", "free", "kept")
        ]
        assert len(set(shades)) == 3
        tab.assert_well(server.url)


@pytest.mark.browser
def test_a_server_without_the_view_says_so(tab: Tab) -> None:
    with ServerProcess("phase5_continuous", "--no-live-view") as server:
        tab.open(server.url)
        assert "--no-live-view" in tab.until("document.getElementById('live-status').textContent")
        write(tab, "Hello!", max_tokens=5)
        assert answered(tab).startswith("Cut at the limit. 5 tokens")
        assert not any(each.endswith("/steps") for each in tab.requested)
        tab.assert_well(server.url)
