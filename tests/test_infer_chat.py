"""`infer chat` in a real terminal (a pty) and in a pipe, with real servers."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from common.models.registry import ZOO, open_checkpoint
from tests.support.forked import Forked
from tests.support.servers import HANG_S, ServerProcess, called_from_python, rendered

ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb", "PYTHONUTF8": "1"}
PHASE = "phase8_prefix"  # earlier turns of a conversation are hits in its cache

FIGURES = re.compile(r"\[(\d+) prompt tokens, (\d+) of them cached; (\d+) new; first after [\d.]+ s")
PROMPT = re.compile(r"> $")
INTERRUPTED = re.escape("(Ctrl-D or /quit ends the chat)")


class Terminal:
    """`infer chat` in a pseudo-terminal, whose other end types and reads."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self._end, end = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "infer", "chat", *arguments],
            stdin=end,
            stdout=end,
            stderr=end,
            cwd=ROOT,
            env=ENVIRONMENT | variables,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C reaches it
        )
        os.close(end)
        self._read = ""

    def __enter__(self) -> Self:
        self.expect(PROMPT)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            for process in [*psutil.Process(self.process.pid).children(), self.process]:
                process.kill()
        self.process.wait()
        os.close(self._end)

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def expect(self, pattern: str | re.Pattern[str], within_s: float = HANG_S) -> re.Match[str]:
        """Read until a pattern comes, and return its match. The text up to the match's end is consumed."""
        deadline = time.monotonic() + within_s
        while not (match := re.search(pattern, self._read)):
            ready, _, _ = select.select([self._end], [], [], deadline - time.monotonic())
            assert ready, f"{pattern!r} did not come, but {self._read!r}"
            try:
                more = os.read(self._end, 4096).decode("utf-8", "replace")
            except OSError:  # how Linux says that the other end is closed
                more = ""
            assert more, f"the chat ended with {self._read!r}"
            self._read += more.replace("\r\n", "\n")
        self._read = self._read[match.end() :]
        return match

    def interrupt_input(self) -> None:
        """Type Ctrl-C at the prompt, and expect the command's message.

        If the signal arrives after `input` has shown its prompt and before it waits, Python handles it only at the
        next key. So Ctrl-C is typed again if no message comes.
        """
        self.type("\x03")
        try:
            self.expect(INTERRUPTED, within_s=1)
        except AssertionError:
            self.type("\x03")
            self.expect(INTERRUPTED)
        self.expect(PROMPT)

    def ask(self, line: str) -> tuple[int, int, int]:
        """Ask a question. Returns the numbers of prompt tokens, of cached ones among them, and of new tokens."""
        self.type(line + "\n")
        prompt, cached, new = map(int, self.expect(FIGURES).groups())
        self.expect(PROMPT)
        return prompt, cached, new

    def say(self, line: str, answer: str) -> None:
        """Type a line, and expect an answer."""
        self.type(line + "\n")
        self.expect(re.escape(answer))
        self.expect(PROMPT)

    def wait(self) -> int:
        while True:  # the process would block if nobody read from its terminal
            try:
                if not os.read(self._end, 4096):
                    break
            except OSError:
                break
        return self.process.wait(HANG_S)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(PHASE, "--max-seq-len", "4096") as process:
        yield process


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose model has no EOS: answers last thousands of tokens. A test may hold its passes."""
    folder = tmp_path_factory.mktemp("endless") / "model"
    shutil.copytree(ZOO / "llama-tiny", folder)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        entries = json.loads((folder / name).read_text()) | {"eos_token_id": None, "eos_token": None}
        (folder / name).write_text(json.dumps(entries))
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    )
    assert not open_checkpoint(str(folder)).config.eos_token_ids
    flags = ("--model", str(folder), "--max-seq-len", "4096", *called_from_python(PHASE))
    with ServerProcess(PHASE, *flags, module="tests.support.gated_server") as process:
        yield process


def prompt_tokens(*contents: str, system: str | None = None) -> int:
    """Return the number of prompt tokens of a conversation in which user and assistant take turns."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages += [
        {"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)
    ]
    return len(rendered(messages))


def answer_to(server: ServerProcess, *contents: str, **fields: Any) -> str:
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)
    ]
    body = {"messages": messages, "temperature": 0} | fields
    answer = server.client.post("/v1/chat/completions", json=body).json()
    return str(answer["choices"][0]["message"]["content"])


# ---------------------------------------------------------------------- a conversation


def test_a_conversation_has_a_history(server: ServerProcess) -> None:
    first, second = "What does a fox like to eat?", "And what does an owl like to eat, dear?"
    said = answer_to(server, first)
    with Terminal("--url", server.url, "--temperature", "0") as terminal:
        terminal.type(first + "\n")
        terminal.expect(re.escape(said))
        prompt, _, new = map(int, terminal.expect(FIGURES).groups())
        assert prompt == prompt_tokens(first)
        assert new > 8
        terminal.expect(r"; [\d.]+ tokens/s\]")
        prompt, cached, _ = terminal.ask(second)
        assert prompt == prompt_tokens(first, said, second)
        assert 0 < cached < prompt
        terminal.say("/reset", "the conversation begins anew")
        assert terminal.ask(first)[0] == prompt_tokens(first)
        terminal.say("/system You are an owl.", "the system prompt is set")
        assert terminal.ask(second)[0] == prompt_tokens(first, said, second, system="You are an owl.")
        terminal.say("/system", "there is no system prompt now")
        terminal.type("/quit\n")
        assert terminal.wait() == 0


def test_an_answer_is_stopped_and_the_next_question_works(endless: ServerProcess) -> None:
    with Terminal("--url", endless.url) as terminal:
        terminal.type("Tell me all.\n")
        terminal.expect(r"(?s)Tell me all\.\n.{3}")
        endless.order("hold")
        terminal.type("\x03")
        terminal.expect(r"\[first after [\d.]+ s; stopped\]")
        terminal.expect(PROMPT)
        endless.order("open")
        terminal.type("Again.\n")
        terminal.expect(r"(?s)Again\.\n.{3}")
        endless.order("hold")
        terminal.type("\x03")
        terminal.expect("stopped")
        endless.order("open")
        terminal.expect(PROMPT)
        terminal.interrupt_input()
        terminal.type("\x04")
        assert terminal.wait() == 0
    endless.begin_test()  # the engine has no request left


def test_commands_and_unknown_commands(server: ServerProcess) -> None:
    with Terminal("--url", server.url, "--system", "You are a fox.", "--max-tokens", "2") as terminal:
        assert terminal.ask("Who?")[::2] == (prompt_tokens("Who?", system="You are a fox."), 2)
        for word in ("/reset", "/system TEXT", "/quit", "Ctrl-C"):
            terminal.say("/help", word)
        terminal.say("/hlep", "error: there is no command /hlep")
        terminal.say("", "")
        assert terminal.ask(" /hlep")[0] > 20


# ---------------------------------------------------------------------- a pipe


def piped(text: str, *arguments: str, **variables: str) -> tuple[int, str, str]:
    """Write a text to the command. Returns its exit code, its answer and its other lines."""
    return Forked("infer", ["chat", *arguments], env=variables).finish(text)


def test_a_pipe_is_one_question(server: ServerProcess) -> None:
    question = "What does a fox like to eat?\nAnd an owl?"
    options = ("--url", server.url + "/v1", "--temperature", "0", "--max-tokens", "9")
    code, answer, log = piped(f"\ufeff{question}\n", *options)  # as Windows writes a file
    assert code == 0, log
    assert answer == answer_to(server, question, max_tokens=9) + "\n"
    figures = FIGURES.match(log)
    assert figures is not None
    assert int(figures[1]) == prompt_tokens(question)
    assert log.endswith("; cut at the most tokens allowed]\n")


@pytest.mark.parametrize(
    ("text", "arguments", "code", "says"),
    [
        ("hi", ["--url", "http://127.0.0.1:9"], 1, "error: http://127.0.0.1:9/v1/ does not answer"),
        (
            "hi",
            ["--url", "http://127.0.0.1:9", "--block-size", "4"],
            2,
            "with --url there is no option --block-size",
        ),
        ("hi", ["--url", "http://[::1"], 1, "error: --url http://[::1: "),
        (
            "hi",
            ["--port=9000"],
            2,
            "there is no option --port: the server that is started is for this chat only",
        ),
        ("hi", ["--url", "URL", "--model", "nobody"], 1, "error: model 'nobody' is not served"),
        ("hi", ["--url", "URL", "--temperature", "nan"], 2, "argument --temperature: nan is not finite"),
        ("\n", ["--url", "URL"], 1, "error: there is no question in the input"),
    ],
    ids=str,
)
def test_a_question_that_cannot_be_asked(
    text: str, arguments: list[str], code: int, says: str, server: ServerProcess
) -> None:
    ended, answer, log = piped(text, *(server.url if each == "URL" else each for each in arguments))
    assert (ended, answer) == (code, "")
    assert says in log
    assert "Traceback" not in log


class Scripted(BaseHTTPRequestHandler):
    """Another project's server: its answers have reasoning, no usage, and an error if the message says `break`."""

    def do_GET(self) -> None:
        self._answer("application/json", json.dumps({"data": [{"id": "scripted"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        deltas: list[dict[str, Any]] = [
            {"role": "assistant", "reasoning_content": "He says "},
            {"reasoning_content": "hi."},
            {"content": f"You sent {len(body['messages'])}\x1b[2J"},
            {"content": "!\n\tBjörn."},
        ]
        events: list[dict[str, Any]] = [{"choices": [{"delta": delta}]} for delta in deltas]
        if "break" in body["messages"][-1]["content"]:
            events.append({"error": {"message": "it \x1b[2Jbroke"}})
        if "separate" in body["messages"][-1]["content"]:
            events = [{"choices": [{"delta": {"content": "a\u2028b\u2029c\x85d"}}]}]
        if "at length" in body["messages"][-1]["content"]:
            events += events * 10_000
        lines = [json.dumps(event, ensure_ascii=False) for event in events] + ["[DONE]"]
        if "garble" in body["messages"][-1]["content"]:
            lines.insert(2, '{"choices": [')
        self._answer("text/event-stream", "".join(f"data: {line}\n\n" for line in lines))

    def _answer(self, kind: str, body: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def scripted() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_any_server_with_openais_api(scripted: str) -> None:
    """Reasoning goes to stderr, the answer to stdout, and control characters do not reach the terminal."""
    code, answer, log = piped("hi", "--url", scripted, "--system", "x")
    assert (code, answer) == (0, "You sent 2[2J!\n\tBjörn.\n")
    assert re.fullmatch(r"He says hi\.\n\[first after [\d.]+ s\]\n", log)


@pytest.mark.parametrize(
    ("redirection", "code", "answer", "says"),
    [
        ("2>&-", 0, "You sent 1[2J!\n\tBjörn.\n", ""),
        ("<&-", 1, "", "error: there is no question in the input"),
        (">&-", 0, "", "He says hi."),
        (">/dev/full", 1, "", "error: [Errno 28] No space left on device"),
        ("2>/dev/full", 1, "", ""),
    ],
)
def test_ends_that_are_closed_or_full(
    redirection: str, code: int, answer: str, says: str, scripted: str
) -> None:
    command = [
        "sh",
        "-c",
        f'exec "$@" {redirection}',
        "sh",
        sys.executable,
        "-m",
        "infer",
        "chat",
        "--url",
        scripted,
    ]
    ended = subprocess.run(command, input="hi", capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT)
    assert (ended.returncode, ended.stdout) == (code, answer)
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_answer_with_separators_of_lines_is_whole(scripted: str) -> None:
    """They end a line of text, but none of an event stream. U+0085 is a control character, which is not printed."""
    assert piped("please separate", "--url", scripted)[:2] == (0, "a\u2028b\u2029cd\n")


def test_an_answer_that_breaks_off_is_forgotten(scripted: str) -> None:
    with Terminal("--url", scripted) as terminal:
        terminal.say("please break", "error: it [2Jbroke")
        terminal.say("please garble", 'error: status 200: {"choices": [')
        terminal.say("hi", "You sent 1")


def test_a_server_with_a_key() -> None:
    with ServerProcess("phase4_static", "--api-key", "k", headers={"Authorization": "Bearer k"}) as server:
        options = ("--url", server.url, "--max-tokens", "1")
        assert piped("hi", *options)[0] == 1
        assert piped("hi", *options, "--api-key", "k")[0] == 0
        assert piped("hi", *options, INFER_API_KEY="k")[0] == 0


# ---------------------------------------------------------------------- a server of its own


@pytest.mark.slow
def test_a_server_lives_as_long_as_its_chat() -> None:
    options = ("--phase", "4", "--max-seq-len", "256", "--dtype", "float32", "--max-tokens", "2")
    with Terminal(*options, INFER_API_KEY="of another server") as terminal:
        (server,) = psutil.Process(terminal.process.pid).children()
        terminal.interrupt_input()
        assert terminal.ask("Who?")[2] == 2
        terminal.type("\x04")
        assert terminal.wait() == 0
        assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_a_server_that_does_not_start_says_why() -> None:
    code, answer, log = piped("hi", "--phase", "4", "--max-seq-len", "0")
    assert (code, answer) == (1, "")
    assert "--max-seq-len (or INFER_MAX_SEQ_LEN): must be greater than or equal to 2" in log
    assert "Traceback" not in log
