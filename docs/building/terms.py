"""Links the first use of each term on a page to its entry in the glossary or on the metrics page."""

from __future__ import annotations

import re

#: The linked terms, and the forms that they have in texts (regular expressions). If two terms begin alike, the
#: longer comes first. Words of everyday English ("request", "load", "view") are left out.
FORMS = {
    "TTFT": "TTFT",
    "ITL": "ITL",
    "sequence": "sequences?",
    "seat": "seats?",
    "batch invariant": "batch[ -]invarian(?:t|ce)",
    "batch": "batch(?:es)?",
    "prefill": "prefill(?:s|ed)?",
    "chunk": "chunks?",
    "decode": "decod(?:e|es|ed|ing)",
    "preempt": "preempt(?:s|ed|ions?)?",
    "retire": "retire[sd]?",
    "column": "columns?",
    "block table": "block tables?",
    "block": "blocks?",
    "slot": "slots?",
    "pool": "pools?",
    "prefix": "prefix(?:es)?",
    "evict": "evict(?:s|ed|ions?)?",
    "in flight": "in flight",
    "zombie": "zombies?",
    "drafter": "drafters?",
    "EOS": "EOS",
    "kernel": "kernels?",
}
METRICS = ("TTFT", "ITL")  # defined on the page about metrics; all other terms are in the glossary

SKIPPED = (
    *("a", "button", "code", "em", "h1", "h2", "h3", "h4"),
    *("label", "pre", "script", "style", "summary", "svg", "th"),
)


USE = re.compile("|".join(rf"\b({forms})\b" for forms in FORMS.values()), re.IGNORECASE)


def anchor_of(term: str) -> str:
    return term.lower().replace(" ", "-")


def with_anchors(html: str) -> str:
    """Return the HTML of a page of definitions, with an anchor for each term that it defines."""

    def anchored(entry: re.Match[str]) -> str:
        marks = "".join(f'<span id="{anchor_of(term)}"></span>' for term in entry[1].split(", "))
        return f"<dt>{marks}{entry[1]}</dt>"

    return re.sub(r"<dt>([^<]+)</dt>", anchored, html)


def linked(html: str, root: str) -> str:
    """Link the first use of each term in `FORMS` to its definition, except inside the tags `SKIPPED`.

    Args:
        root: the relative path from the page to the site's root.
    """
    seen: set[str] = set()

    def link(use: re.Match[str]) -> str:
        term = next(term for place, term in enumerate(FORMS, start=1) if use[place])
        if term in seen:
            return use[0]
        seen.add(term)
        page = "metrics" if term in METRICS else "glossary"
        return f'<a class="term" href="{root}{page}.html#{anchor_of(term)}">{use[0]}</a>'

    skipping = 0
    parts = []
    for part in re.split(r"(<[^>]*>)", html):
        tag = re.match(r"<(/?)([a-z0-9]+)", part)
        if tag and tag[2] in SKIPPED:
            skipping += -1 if tag[1] else 1
        parts.append(part if tag or skipping else USE.sub(link, part))
    return "".join(parts)
