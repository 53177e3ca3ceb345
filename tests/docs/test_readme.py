"""The README's examples work when they are pasted."""

from __future__ import annotations

import re

import pytest

from tests.docs.support import ROOT
from tests.support.servers import ServerProcess

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
HOME = "http://127.0.0.1:8009"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_the_examples_in_python_print_stories(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("openai")
    online, offline = blocks("python")
    assert HOME in online
    exec(online.replace(HOME, server.url), {})
    assert len(capsys.readouterr().out) > 100
    exec(offline, {})
    assert len(capsys.readouterr().out) > 100


def test_commands_are_found_without_an_activated_environment() -> None:
    for block in blocks("sh"):
        if block.startswith("uv tool install "):
            continue  # this command puts `infer` on the path
        for line in filter(None, block.splitlines()):
            assert line.startswith(("make ", ".venv/bin/", "curl ", "export ", " ", "#")), line


def test_its_measured_gains_are_those_of_the_start_page() -> None:
    start = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    measured = re.findall(r"^\| (\d+) \| `\w+` \| .+ \| (.+) \|$", TEXT, re.MULTILINE)
    assert measured == re.findall(r"^\| \[(\d+): [^|]+\|[^|]+\| (\S[^|]*) \|$", start, re.MULTILINE)
    assert len(measured) == 8
