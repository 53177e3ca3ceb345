"""Links the first use of each term on a page to its entry in the glossary or on the metrics page."""

from __future__ import annotations

import re

#: The linked terms. If two terms begin alike, the longer comes first. Words of everyday English ("request", "load",
#: "view") are left out.
TERMS = (
    *("TTFT", "ITL", "sequence", "seat", "batch invariant", "batch", "prefill", "chunk", "decode", "preempt"),
    *("retire", "column", "block table", "block", "slot", "pool", "prefix", "evict", "in flight", "zombie"),
    *("drafter", "EOS", "kernel"),
)
METRICS = ("TTFT", "ITL")  # defined on the page about metrics; all other terms are in the glossary

SKIPPED = (
    *("a", "button", "code", "em", "h1", "h2", "h3", "h4"),
    *("label", "pre", "script", "style", "summary", "svg", "th"),
)

USE = re.compile(rf"\b({'|'.join(TERMS)})(?:s|es|d|ed|ing|ions?)?\b", re.IGNORECASE)
CANONICAL = {term.lower(): term for term in TERMS}


def with_anchors(html: str) -> str:
    """Return the HTML of a page of definitions, with an anchor for each term that it defines."""

    def anchored(entry: re.Match[str]) -> str:
        marks = "".join(f'<span id="{_anchor(term)}"></span>' for term in entry[1].split(", "))
        return f"<dt>{marks}{entry[1]}</dt>"

    return re.sub(r"<dt>([^<]+)</dt>", anchored, html)


def linked(html: str, root: str) -> str:
    """Link the first use of each term to its definition, except inside the tags `SKIPPED`.

    Args:
        root: the relative path from the page to the site's root.
    """
    seen: set[str] = set()

    def link(use: re.Match[str]) -> str:
        term = CANONICAL[use[1].lower()]
        if term in seen:
            return use[0]
        seen.add(term)
        page = "metrics" if term in METRICS else "glossary"
        return f'<a class="term" href="{root}{page}.html#{_anchor(term)}">{use[0]}</a>'

    skipping = 0
    parts = []
    for part in re.split(r"(<[^>]*>)", html):
        tag = re.match(r"<(/?)([a-z0-9]+)", part)
        if tag and tag[2] in SKIPPED:
            skipping += -1 if tag[1] else 1
        parts.append(part if tag or skipping else USE.sub(link, part))
    return "".join(parts)


def _anchor(term: str) -> str:
    return term.lower().replace(" ", "-")
