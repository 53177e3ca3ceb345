"""Links from the course's pages to the glossary."""

from __future__ import annotations

import re

import pytest

from docs.building import terms
from tests.docs.support import ROOT


@pytest.mark.parametrize("term", terms.FORMS)
def test_every_linked_word_has_its_entry_and_is_a_form_of_its_own(term: str) -> None:
    page = "metrics.md" if term in terms.METRICS else "glossary.md"
    entries = re.findall(r"^(.+)\n:   ", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert term in [word for entry in entries for word in entry.split(", ")]
    assert terms.linked(f"<p>{term}</p>", "").count(f'#{terms.anchor_of(term)}">{term}</a>') == 1


def test_only_the_first_use_in_a_sentence_is_linked() -> None:
    page = '<h2>Seats</h2><p><a href="x">seat</a> <code>seat</code> <em>Seats, a paper</em> '
    page += "Two <strong>seats</strong>, and one seat.</p>"
    link = '<a class="term" href="../glossary.html#seat">seats</a>'
    assert terms.linked(page, "../") == page.replace("<strong>seats</strong>", f"<strong>{link}</strong>")


def test_a_longer_term_is_not_taken_for_the_shorter_one() -> None:
    shown = terms.linked("<p>A block table has blocks. A blockade and a slotted spoon have none.</p>", "")
    assert re.findall(r"#([\w-]+)\">(.+?)</a>", shown) == [
        ("block-table", "block table"),
        ("block", "blocks"),
    ]


def test_an_entry_has_an_anchor_for_each_of_its_words() -> None:
    shown = terms.with_anchors("<dl><dt>TTFT, time to first token</dt><dd>…</dd></dl>")
    assert re.findall(r'id="([\w-]+)"', shown) == ["ttft", "time-to-first-token"]
