"""Open WebUI's own server, asked as its page asks it: the connection, the list, a chat, a title."""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

from harness import GIVEN, joined, report

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
url = f"http://127.0.0.1:{port}"
settings = {
    "OPENAI_API_BASE_URL": GIVEN["url"] + "/v1",
    "OPENAI_API_KEY": GIVEN["key"],
    "ENABLE_OLLAMA_API": "False",
    "DATA_DIR": str(pathlib.Path("data").absolute()),
    "WEBUI_AUTH": "False",
    "OFFLINE_MODE": "True",
    "RAG_EMBEDDING_ENGINE": "openai",  # its own would be downloaded
}
command = [str(pathlib.Path(sys.executable).parent / "open-webui"), "serve", "--host", "127.0.0.1"]
log = pathlib.Path("open-webui.log")
token = ""


def ask(path: str, **body: Any) -> str:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    data = json.dumps(body).encode() if body else None
    with urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=120) as answer:
        return answer.read().decode()


def connection() -> Any:
    """The connection's check, and the list of models."""
    said = json.loads(ask("/openai/verify", url=GIVEN["url"] + "/v1", key=GIVEN["key"]))
    assert [model["id"] for model in said["data"]] == [GIVEN["model"]]
    listed = [model["id"] for model in json.loads(ask("/api/models"))["data"]]
    assert GIVEN["model"] in listed
    return listed


def chat() -> Any:
    """The answer's text, streamed through Open WebUI."""
    asked = {"model": GIVEN["model"], "messages": GIVEN["messages"], "stream": True}
    said = ask("/api/chat/completions", **asked, temperature=0, max_tokens=GIVEN["max_tokens"])
    events = [line.removeprefix("data: ") for line in said.splitlines() if line.startswith("data: ")]
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return joined(choice["delta"].get("content") for choice in choices)


def title() -> Any:
    turns = [*GIVEN["messages"], {"role": "assistant", "content": "Once upon a time there was a fox."}]
    said = json.loads(ask("/api/v1/tasks/title/completions", model=GIVEN["model"], messages=turns))
    return said["choices"][0]["message"]["content"]


with (
    log.open("w") as written,
    subprocess.Popen(
        [*command, "--port", str(port)], env=os.environ | settings, stdout=written, stderr=written
    ) as server,
):
    try:
        while server.poll() is None:
            with contextlib.suppress(urllib.error.URLError):
                ask("/health")
                break
            time.sleep(0.5)
        else:
            raise AssertionError(log.read_text())
        token = json.loads(ask("/api/v1/auths/signin", email="", password=""))["token"]
        report(said=[connection, title], chat=[chat])
    finally:
        server.kill()
