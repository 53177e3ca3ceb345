"""Finds the transcripts on pages and in the README: answers of a server, each below its `curl` command."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from tests.docs.support import ROOT

BLOCK = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
CURL = re.compile(r"curl .*?http://127\.0\.0\.1:8009(\S+)[\s\S]*?-d '([^']*)'")
#: Fields whose values differ between two runs of one command.
VOLATILE = {"id", "created", "cached_tokens"}


@dataclass(frozen=True)
class Transcript:
    """A request of a page, and its answer as shown. `…` and fields that are left out may be anything."""

    page: str
    route: str
    body: dict[str, Any]
    shown: str

    def check(self, url: str) -> None:
        """Send the request, and assert that the answer is the one that is shown."""
        answer = httpx.post(url + self.route, json=self.body, timeout=300)
        if "data: " in self.shown:
            shown, found = _events(self.shown), _events(answer.text)
            assert _contained(shown, found), f"{shown}\n{found}"
            return
        content = answer.json()["choices"][0]["message"]["content"]
        pattern = ".*".join(re.escape("".join(part.split())) for part in self.shown.split("…"))
        texts = ["".join(text.split()) for text in (answer.text, content)]
        assert any(re.fullmatch(pattern, text) for text in texts), f"{self.shown}\n{answer.text}"


def transcripts(model: str) -> list[Transcript]:
    """Return the transcripts of all pages whose requests name this model."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        each
        for page in pages
        for each in _of_page(page.name, page.read_text("utf-8"))
        if each.body["model"] == model
    ]


def _of_page(name: str, text: str) -> Iterator[Transcript]:
    """Yield the transcripts of a page: text blocks that begin like an answer, below a command."""
    asked: list[tuple[str, dict[str, Any]]] = []
    for language, content in BLOCK.findall(text):
        if language == "sh":
            asked += [(route, json.loads(body)) for route, body in CURL.findall(content)]
        elif "text" in language and re.match(r'(event: |data: |\{"id":|1\. )', content):
            is_chat = "chatcmpl" in content or content.startswith("1. ")
            route, body = next(
                each for each in reversed(asked) if each[0].endswith("chat/completions") is is_chat
            )
            yield Transcript(name, route, body, content)


def _events(stream: str) -> list[tuple[str, Any]]:
    """Return the name and the data of each event of a stream."""
    found = re.findall(r"(?:event: (\w+)\n)?data: (.+)", stream)
    return [(name, json.loads(data) if data.startswith("{") else data) for name, data in found]


def _contained(shown: Any, found: Any) -> bool:
    """Return whether a JSON value has all that is shown of it."""
    if isinstance(shown, dict):
        return all(key in VOLATILE or _contained(shown[key], found.get(key)) for key in shown)
    if isinstance(shown, list | tuple):
        return len(shown) == len(found) and all(map(_contained, shown, found))
    return bool(shown == found)
