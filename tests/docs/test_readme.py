"""The README's examples work when they are pasted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from docs.building import peers
from tests.docs.support import ROOT
from tests.server.support import ServerProcess

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
HOME = "http://127.0.0.1:8009"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    process = ServerProcess("phase9_pipelined")
    yield process
    process.close()


def test_the_chat_example_has_the_answer_that_is_shown(server: ServerProcess) -> None:
    (command,) = (each for each in blocks("sh") if "/v1/chat/completions" in each and "zoo:" in each)
    address, body = re.search(rf"curl {HOME}(\S+) .* -d '(.*)'", command, re.DOTALL).groups()  # type: ignore[union-attr]
    answer = server.client.post(address, json=json.loads(body)).json()
    (shown,) = (each for each in blocks("text") if '"object":"chat.completion"' in each)
    assert f'"content":{json.dumps(answer["choices"][0]["message"]["content"], ensure_ascii=False)}' in shown
    assert f'"prompt_tokens":{answer["usage"]["prompt_tokens"]},' in shown


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


def test_its_picture_is_there_and_small() -> None:
    (picture,) = re.findall(r"!\[[^]]+\]\((\S+)\)", TEXT)
    assert 0 < (ROOT / picture).stat().st_size < 200_000


def test_the_bars_beside_vllm_are_the_published_results() -> None:
    assert f"```text\n{peers.peer_bars()}```" in TEXT
    assert " ".join(peers.conditions().split()) in " ".join(TEXT.split())
