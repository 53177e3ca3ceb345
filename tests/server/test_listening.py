"""Files that a server is started with: a socket, certificates, a chat template."""

from __future__ import annotations

import socket
import ssl
import stat
from pathlib import Path

import pytest

from common.errors import StartupError
from common.server import run
from common.server.http.sockets import listen
from common.server.options import ServerOptions
from tests.support.forked import Forked
from tests.support.servers import ServerProcess

PHASE = "phase5_continuous"
TLS = Path(__file__).parent / "tls"


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
        second, printed, log = Forked(run.__name__, PHASE, ["--device", "cpu", "--uds", str(path)]).finish()
        assert (second, printed) == (1, "")
        assert "another server listens there" in log
        assert server.complete(max_tokens=2)["choices"]
        server.signal()
        assert server.wait() == 0
        assert not path.exists()


def test_a_unix_socket_has_one_server(tmp_path: Path) -> None:
    """Also while models are loaded, when nothing listens yet."""
    path = tmp_path / "infer.sock"
    options = ServerOptions(uds=path)
    with listen(options):
        with pytest.raises(StartupError, match="another server listens there"), listen(options):
            pass
        assert path.is_socket(), "the first server's"
        path.unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
    assert path.is_socket(), "another program's"
    with listen(options):
        assert path.is_socket()


def test_a_chat_template_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with ServerProcess(PHASE, "--chat-template", str(file), "--max-seq-len", "64") as server:
        body = {"messages": [{"role": "user", "content": "Once upon"}]}
        said = server.client.post("/tokenize", json=body).json()["tokens"]
        plain = {"prompt": "Once upon", "add_special_tokens": False}
        assert said == server.client.post("/tokenize", json=plain).json()["tokens"]


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
