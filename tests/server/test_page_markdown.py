"""Answers in Markdown on the page at `/`: markdown-it's elements, with nothing but text in them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest
from markdown_it import MarkdownIt

from tests.support.browser import Tab
from tests.support.servers import ServerProcess

pytestmark = pytest.mark.browser

ORACLE = (
    MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable(["code", "lheading"])
)

#: Draws a text as the page does, and returns its elements in a plain form, to compare them with the oracle's HTML.
PLAIN = """
window.plain = box => [...box.childNodes].map(node => {
    if (node.nodeType === 3) return box.closest("pre") ? node.data : node.data.replace(/\\s+/g, " ");
    if (node.matches(".fence-head")) return "";
    if (node.matches("div")) return plain(node);
    const tag = node.tagName.toLowerCase().replace(/^h(\\d)$/, (_, level) => "h" + (level - window.shift))
        .replace(/^s$/, "del");
    const side = node.style.textAlign.replace("left", "");
    const about = [node.getAttribute("href"), side, tag === "ol" ? node.start : ""];
    return `<${[tag, ...about.filter(each => each)].join(" ")}>${plain(node)}</>`;
}).join("").replace(/\\s*(<\\/?[^>]*>)\\s*/g, "$1");
window.ours = text => {
    const box = document.createElement("div");
    document.body.append(box);
    drawMarkdown(box, text);
    window.shift = 2;
    const found = [plain(box), box.textContent];
    box.remove();
    return found;
};
window.theirs = html => {
    window.shift = 0;
    return plain(new DOMParser().parseFromString(html, "text/html").body);
};
"""

ALIKE = [
    "one line\n\nanother *line*",
    "# One\n## Two ##\n### Three `code`\n#### Four\n#hashtag\n####### seven",
    "- a\n- b\n\nthen\n\n* c\n* d",
    "1. a\n2. b\n   - c\n   - d\n     1) e\n3. f",
    "3. begins at three\n4. goes on",
    "- a\n\n  with a paragraph\n\n- b",
    "- item\n  ```py\n  x = 1\n\n  y = 2\n  ```\n- next",
    "- a\nlazy line\n- b\n\nnot in it",
    "text\n- a list after a line\n1. another kind",
    "He was born in\n1984. That was long ago.",
    "> a quote\n> of two lines\nlazy\n\n> # Head\n> - list\n> > deeper",
    "| a | b | c |\n|:--|--:|:-:|\n| 1 | **2** | `3` |\n| 4 |\n\nafter",
    "a | b\n--|--\n1 | x \\| y\n\nno | table\nhere",
    "```python\nprint('*a*')\n    # deep\n```\nafter\n~~~\n```\n~~~\n````\n```\n````",
    "```\nnot closed\n\n# no heading",
    "***\n---\n_ _ _\n-- -",
    "*em* _em_ **strong** __strong__ ***both*** ~~gone~~ snake_case_name 5 * 3 * 2 a*b*c **not closed",
    "**a *b* c** *a **b** c* **a*b** x*",
    "`a``b` ``c`d`` ` e ` ``` f",
    "a \\* b \\_ c \\` d \\\\ e \\x \\[no](link)",
    '[words **bold**](https://example.com/a_(b)?c=d) [with title](https://example.com "title")',
    "[a [b] c](https://example.com) [not a link] [nor](this one) ](https://example.com)",
    "Zoë’s **“quoted”** text, **猫**です。 🦊*fox*🦊",
]


@pytest.fixture(scope="module")
def page(tab: Tab) -> Iterator[Tab]:
    with ServerProcess("phase5_continuous") as server:
        tab.open(server.url)
        tab.ask(PLAIN + ";0")
        yield tab
        tab.assert_well(server.url)


def ours(page: Tab, text: str) -> str:
    """Return the elements that the page makes of a text."""
    found: str = page.ask(f"ours({json.dumps(text)})[0]")
    return found


@pytest.mark.parametrize("text", ALIKE)
def test_the_elements_are_those_of_markdown_it(page: Tab, text: str) -> None:
    assert ours(page, text) == page.ask(f"theirs({json.dumps(ORACLE.render(text))})")


@pytest.mark.parametrize(
    "target",
    ["javascript:alert(1)", "JavaScript:alert(1)", "data:text/html,x", "file:///etc/passwd", "//x.org", "a"],
)
def test_links_lead_to_the_web_only(page: Tab, target: str) -> None:
    text = f"[words]({target}) and <b>markup</b> <img src=x onerror=alert(1)> &lt;"
    assert page.ask(f"ours({json.dumps(text)})[1]") == text, "it stays as it was written"
    page.ask("drawMarkdown(globalThis.box = document.createElement('div'), '[w](https://x.org/)')")
    assert page.ask("box.querySelector('a').rel").split() == ["noopener", "noreferrer"]


def test_random_markdown_loses_no_word(page: Tab) -> None:
    randomly = random.Random(3)
    pieces = [*"*_`~[]()>#-+|!\\<& \n\n", "**", "```", "1. ", "- ", "  ", "](https://x.org)", "word", "ß🦊"]
    texts = ["".join(randomly.choices(pieces, k=40)) for _ in range(400)]
    drawn = page.ask(f"{json.dumps(texts)}.map(text => ours(text)[1])")
    for text, found in zip(texts, drawn, strict=True):
        # The word behind a fence is the code's language, and names no element of the text.
        assert found.count("ß🦊") == text.count("ß🦊")


@pytest.mark.parametrize(
    "piece",
    [
        "*",
        "**a ",
        "*a _b ",
        "[",
        "[a](",
        "](",
        "`a",
        "`` ` ",
        "> ",
        "- ",
        "- a\n",
        "|",
        "|-",
        "https://x.",
        "\\",
    ],
)
def test_the_time_is_proportional_to_the_length(page: Tab, piece: str) -> None:
    text = json.dumps(piece * (60_000 // len(piece)))
    took = page.ask(f"(start => (ours({text}), performance.now() - start))(performance.now())")
    assert took < 3000, "milliseconds; a quadratic one takes minutes"
