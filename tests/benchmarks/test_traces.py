"""Traces kept beside results: whole events however the network cuts them, and a note if there is no trace."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.files import load_runs
from benchmarks.traces import kept_trace
from benchmarks.workloads import PromptWriter
from tests.benchmarks.test_compare import run_comparison
from tests.benchmarks.test_servers import fake_target
from tests.server.support import ServerProcess
from tests.support.traces import assert_valid, read_trace, requests_of

EVENTS = [{"ph": "M", "name": "é", "pid": 1}, *({"ph": "C", "ts": i, "name": "n" * 50} for i in range(40))]


@contextmanager
def serving(chunks: list[bytes], *, ends: bool, key: str | None = None) -> Iterator[str]:
    """Run a server whose /trace sends these pieces, and then ends or hangs."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if key is not None and self.headers["Authorization"] != f"Bearer {key}":
                self.send_error(401)
                return
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for chunk in chunks:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
                self.wfile.flush()
            if ends:
                self.wfile.write(b"0\r\n\r\n")
            else:
                over.wait(30)
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        over.set()
        server.shutdown()
        server.server_close()


def pieces(text: bytes, size: int) -> list[bytes]:
    return [text[i : i + size] for i in range(0, len(text), size)]


LINES = b"[\n" + b",\n".join(json.dumps(event).encode() for event in EVENTS)


@pytest.mark.parametrize("size", [7, 64, 100_000])
def test_a_trace_that_its_reader_leaves_is_completed(tmp_path: Path, size: int) -> None:
    with serving(pieces(LINES, size), ends=False) as url, kept_trace(url, tmp_path / "a.trace") as problems:
        pass
    assert problems == []
    assert json.loads((tmp_path / "a.trace").read_bytes()) == EVENTS


def test_a_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    with serving([LINES[:-20]], ends=False) as url, kept_trace(url, tmp_path / "a.trace"):
        pass
    assert json.loads((tmp_path / "a.trace").read_bytes()) == EVENTS[:-1]


def test_a_trace_that_the_server_ends_stays_as_it_is(tmp_path: Path) -> None:
    with serving([LINES + b"\n]\n"], ends=True) as url, kept_trace(url, tmp_path / "a.trace") as problems:
        pass
    assert problems == []
    assert (tmp_path / "a.trace").read_bytes() == LINES + b"\n]\n"


def test_a_key_is_sent_and_a_refusal_is_said(tmp_path: Path) -> None:
    with serving([LINES], ends=False, key="secret") as url:
        with kept_trace(url, tmp_path / "a.trace", "secret") as problems:
            pass
        assert problems == []
        with kept_trace(url, tmp_path / "b.trace") as problems:
            pass
    assert problems == ["the server has none (status 401 of /trace)"]
    assert not (tmp_path / "b.trace").exists()
    with kept_trace(url, tmp_path / "b.trace") as problems:  # the server has ended
        pass
    (problem,) = problems
    assert "does not answer" in problem


def test_a_server_without_traces_is_measured_and_that_is_noted(tmp_path: Path, writer: PromptWriter) -> None:
    runs, _ = run_comparison([fake_target("a peer", 4)], writer, tmp_path, trace=True)
    assert [run.status for run in runs] == ["ok"]
    assert [note for note in runs[0].notes if "trace" in note] == [
        "no trace: the server has none (status 404 of /trace)"
    ]
    assert list(tmp_path.glob("*.trace")) == []


@pytest.mark.slow
def test_a_runs_trace_has_its_requests(tmp_path: Path) -> None:
    server = ServerProcess("phase7_chunked")
    try:
        arguments = ["run", "--server", server.url, "--tokenizer", "zoo:llama-tiny", "--workload", "mixed"]
        arguments += ["--quick", "--rate", "20", "--out", str(tmp_path), "--trace"]
        assert main(arguments) == 0
    finally:
        server.close()
    (run,) = load_runs(tmp_path)
    path = (tmp_path / run.file_name).with_suffix(".trace")
    assert f"recorded meanwhile: {path.name}" in run.notes
    events = read_trace(path.read_bytes())
    assert path.read_bytes().endswith(b"]\n")
    assert_valid([*events])
    ended = [track[-1] for track in requests_of(events).values()]
    assert sum(end["args"]["reason"] == "length" for end in ended) >= len(run.requests)
