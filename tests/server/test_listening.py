"""Servers of other models, and files that a server is started with: a socket, certificates, a chat template."""

from __future__ import annotations

import socket
import ssl
import stat
from pathlib import Path

from tests.server.support import HANG_S, ForkedProcess, ServerProcess

PHASE = "phase5_continuous"
TLS = Path(__file__).parent / "tls"


def start_and_fail(*options: str) -> str:
    process = ForkedProcess(PHASE, ["--device", "cpu", "--port", "0", *options])
    with process.stdin, process.stdout, process.stderr:
        assert process.wait(HANG_S) == 1
        assert process.stdout.read() == ""
        (line,) = [each for each in process.stderr.read().splitlines() if " INFO " not in each]
    return line


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "infer.sock"
    with socket.socket(socket.AF_UNIX) as killed:  # its file stays
        killed.bind(str(path))
    with ServerProcess(PHASE, "--uds", str(path), "--max-seq-len", "64") as server:
        assert server.url == f"unix:{path}"
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert server.complete(max_tokens=2)["usage"]["completion_tokens"] == 2
        # A proxy in front of a Unix socket may send any host name.
        assert server.client.get("/v1/models", headers={"Host": "chat.example.org"}).status_code == 200
        assert "another server listens there" in start_and_fail("--uds", str(path))
        assert server.complete(max_tokens=2)["choices"]
        server.signal()
        assert server.wait() == 0
        assert not path.exists()


def test_a_chat_template_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with ServerProcess(PHASE, "--chat-template", str(file), "--max-seq-len", "64") as server:
        body = {"messages": [{"role": "user", "content": "Once upon"}]}
        said = server.client.post("/tokenize", json=body).json()["tokens"]
        plain = {"prompt": "Once upon", "add_special_tokens": False}
        assert said == server.client.post("/tokenize", json=plain).json()["tokens"]
    file.unlink()
    assert str(file) in start_and_fail("--chat-template", str(file))


def test_a_file_that_can_be_no_socket(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    for path in (file, tmp_path / "no" / "folder"):
        assert start_and_fail("--uds", str(path)).startswith(f"error: --uds {path}: ")
    assert file.read_text() == "mine"


def test_tls() -> None:
    certificate, key = TLS / "certificate.pem", TLS / "key.pem"
    trust = ssl.create_default_context(cafile=str(certificate))
    with ServerProcess(
        PHASE,
        *("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--max-seq-len", "64"),
        verify=trust,
    ) as server:
        assert server.url.startswith("https://127.0.0.1:")
        assert server.complete(max_tokens=2)["usage"]["completion_tokens"] == 2
        refused = server.client.post("/v1/completions", content=iter([b" " * 2**16] * 64))
        assert refused.status_code == 400, "an answer before the end of the request"
        assert server.complete(max_tokens=2)["choices"]


def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    certificate, key = TLS / "certificate.pem", TLS / "key.pem"
    (tmp_path / "empty.pem").write_text("")
    for files in ((tmp_path / "none.pem", key), (tmp_path / "empty.pem", key), (certificate, certificate)):
        options = ("--ssl-certfile", str(files[0]), "--ssl-keyfile", str(files[1]))
        assert start_and_fail(*options).startswith(
            f"error: --ssl-certfile {files[0]} --ssl-keyfile {files[1]}: "
        )
