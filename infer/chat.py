"""`infer chat`: a conversation with a model in the terminal, over OpenAI's chat API.

```text
infer chat                         starts a server of the last phase with the bundled model, for this chat
infer chat --model smollm2         the same with another model; further options go to the server
infer chat --url http://HOST:PORT  talks to a server that runs already, this project's or another
echo "Who are you?" | infer chat   asks its whole input as one question, prints the answer, and exits
```

Answers go to stdout. The thoughts of a reasoning model, figures, errors and notes go to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn, TextIO

import httpx

from benchmarks.events import data_of
from common.errors import StartupError

DEFAULT_MODEL = "zoo:llama-tiny"
ADDRESS = {"--host", "--port", "--uds", "--ssl-certfile", "--ssl-keyfile"}  # options of a server for others
CONNECT_S = 10.0  # a server that listens accepts a connection far sooner; its first token may take minutes

HELP = """\
/reset          forget the conversation
/system TEXT    the system prompt from now on; without TEXT there is none
/help           this list
/quit           end the chat, as Ctrl-D does
Ctrl-C stops an answer; what it said so far stays in the conversation"""

#: Control characters that a terminal would obey. Line ends and tabs are printed.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class ChatError(Exception):
    """A question got no answer, or not a whole one. The message is for people."""


@dataclass(slots=True)
class Figures:
    """Figures about one answer, for the user: its token counts, if the server sends them, and times.

    Times are those of the monotonic clock, in seconds.
    """

    asked_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    last_s: float | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    stopped: bool = False

    def note_token(self) -> None:
        self.last_s = time.monotonic()
        self.first_s = self.last_s if self.first_s is None else self.first_s

    def __str__(self) -> str:
        """Return the figures that are known, in one line."""
        known: list[str] = []
        new = self.usage.get("completion_tokens", 0)
        if self.usage:
            cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            known += [
                f"{self.usage.get('prompt_tokens', 0)} prompt tokens, {cached} of them cached",
                f"{new} new",
            ]
        if self.first_s is not None and self.last_s is not None:
            known.append(f"first after {self.first_s - self.asked_s:.2f} s")
            if new > 1 and self.last_s > self.first_s:
                known.append(f"{(new - 1) / (self.last_s - self.first_s):.1f} tokens/s")
        if self.finish_reason == "length":
            known.append("cut at the most tokens allowed")
        if self.stopped:
            known.append("stopped")
        return f"[{'; '.join(known)}]"


class Chat:
    """A conversation with a model behind OpenAI's API.

    Args:
        client: an HTTP client whose base URL ends with the API's prefix, such as `/v1/`.
        model: the model's name.
        system: the system prompt; None: none.
        sampling: fields of every request, such as `temperature`.

    Attributes:
        history: the messages so far, without the system prompt.
    """

    def __init__(
        self, client: httpx.Client, model: str, system: str | None = None, **sampling: float | int
    ) -> None:
        self._client = client
        self.model = model
        self.system = system
        self.history: list[dict[str, str]] = []
        self._sampling = sampling

    def ask(self, question: str) -> Figures:
        """Ask a question, print the answer as it comes, and add both to the history. Returns figures of the answer.

        Ctrl-C stops the answer; its text up to then is added. If the answer has no text, nothing is added.

        Raises:
            ChatError: the server refused the question, failed, or cannot be reached. The history is as before.
        """
        asked = {"role": "user", "content": question}
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        body = {
            "model": self.model,
            "messages": [*system, *self.history, asked],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._sampling,
        }
        figures, text, thought = Figures(), "", ""
        try:
            with self._client.stream("POST", "chat/completions", json=body) as response:
                for chunk in _chunks(response):
                    figures.usage = chunk.get("usage") or figures.usage
                    for choice in chunk.get("choices") or ():
                        delta = choice.get("delta") or {}
                        figures.finish_reason = choice.get("finish_reason")
                        if more := delta.get("reasoning_content"):
                            figures.note_token()
                            _show(more, sys.stderr)
                            thought += more
                        if more := delta.get("content"):
                            figures.note_token()
                            if thought and not text:
                                say("")
                            _show(more, sys.stdout)
                            text += more
        except KeyboardInterrupt:
            figures.stopped = True
        except httpx.HTTPError as error:
            raise ChatError(
                f"{self._client.base_url} does not answer: {error or type(error).__name__}"
            ) from None
        finally:
            if text:
                print(flush=True)
            elif thought:
                say("")
        if text:
            self.history += [asked, {"role": "assistant", "content": text}]
        return figures


def _show(text: str, file: TextIO | None) -> None:
    """Print a piece of a text without the control characters that a terminal would obey.

    `file` is None if the shell has closed it (`2>&-`).
    """
    if file is None:
        return
    print(text.translate(_CONTROLS), end="", file=file, flush=True)


def _as_text(argument: str | None) -> str | None:
    """Return an argument of the command with U+FFFD for each byte that is not UTF-8: JSON is UTF-8."""
    return None if argument is None else os.fsencode(argument).decode("utf-8", "replace")


def _chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of an answer's stream. Raises ChatError if the server sends anything else."""
    if response.status_code != 200:
        raise ChatError(_message_of(response.read().decode("utf-8", "replace"), response.status_code))
    for event in data_of(response.iter_bytes()):
        try:
            chunk = json.loads(event)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict) or "error" in chunk:
            raise ChatError(_message_of(event.decode("utf-8", "replace"), 200))
        yield chunk


def _message_of(body: str, status: int) -> str:
    """Return the message of an error in OpenAI's form. Of any other body, return the status and the beginning."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"]["message"])
    return f"status {status}: {' '.join(body.split())[:200]}"


# ---------------------------------------------------------------------- terminal and pipe


def talk(chat: Chat) -> int:
    """Read questions and commands from the terminal until the user ends the chat. Returns the exit code."""
    with contextlib.suppress(ImportError):  # not on every platform; then lines cannot be edited
        import readline  # noqa: F401 - `input` uses it
    say(f"{chat.model}: /help lists the commands; Ctrl-C stops an answer, Ctrl-D ends the chat")
    while True:
        try:
            line = input("> ")
            if line.startswith("/"):
                if not _obey(chat, line):
                    return 0
            elif line.strip():
                say(str(chat.ask(line)))
        except ChatError as error:
            say(f"error: {error}")
        except KeyboardInterrupt:
            say("\n(Ctrl-D or /quit ends the chat)")
        except EOFError:
            print()
            return 0


def _obey(chat: Chat, line: str) -> bool:
    """Run the command in a line that begins with `/`. Returns False if it ends the chat."""
    word, _, rest = line.partition(" ")
    match word:
        case "/quit" | "/exit":
            return False
        case "/reset":
            chat.history.clear()
            say("the conversation begins anew")
        case "/system":
            chat.system = rest.strip() or None
            say("there is no system prompt now" if chat.system is None else "the system prompt is set")
        case "/help":
            say(HELP)
        case _:
            say(
                f"error: there is no command {word}; /help lists them, and a space before a / makes it a question"
            )
    return True


def answer(chat: Chat, question: str) -> int:
    """Ask one question and print the answer. Returns the exit code: 1 after an error, 130 after Ctrl-C."""
    if not question:
        say("error: there is no question in the input")
        return 1
    try:
        figures = chat.ask(question)
    except ChatError as error:
        say(f"error: {error}")
        return 1
    say(str(figures))
    return 130 if figures.stopped else 0


def say(text: str) -> None:
    """Print a line that is no part of an answer, to stderr."""
    _show(f"{text}\n", sys.stderr)


# ---------------------------------------------------------------------- the command


def main(arguments: Sequence[str]) -> int:
    """Run `infer chat`. Returns the exit code."""
    options, further = _parser().parse_known_args(arguments)
    if options.url and further:
        _parser().error(f"with --url there is no option {further[0]}")
    for option in (word.partition("=")[0] for word in further):
        if option in ADDRESS:
            _parser().error(f"there is no option {option}: the server that is started is for this chat only")
    sampling = {name: getattr(options, name) for name in ("temperature", "max_tokens", "seed")}
    for number in (signal.SIGTERM, signal.SIGHUP):  # a server that was started for the chat ends with it
        signal.signal(number, _exit)
    try:
        with _server(options, further) as url, _client(url, options.api_key) as client:
            model = options.model if options.url and options.model else _first_model(client)
            given = {name: value for name, value in sampling.items() if value is not None}
            chat = Chat(client, model, _as_text(options.system), **given)
            if sys.stdin is not None and sys.stdin.isatty():
                return talk(chat)
            return answer(chat, _whole_input())
    except StartupError as error:
        say(f"error: {error}")
        return 1
    except OSError as error:
        is_pipe = isinstance(error, BrokenPipeError)  # as with `| head`
        if not is_pipe:  # a full disk, say
            with contextlib.suppress(OSError):
                say(f"error: {error}")
        for end in (sys.stdout, sys.stderr):  # Python would fail again when it flushes at its exit
            if end is not None:
                os.dup2(os.open(os.devnull, os.O_WRONLY), end.fileno())
        return 128 + signal.SIGPIPE if is_pipe else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="infer chat",
        description="Chat with a model. Without --url, a server is started for the chat, and further options are "
        "that server's: see infer serve --help.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--url", help="address of a running server with OpenAI's API, this project's or another"
    )
    parser.add_argument(
        "--api-key", help="what that server wants as a bearer token; better set as INFER_API_KEY"
    )
    parser.add_argument(
        "--model",
        help="with --url, a name that the server knows (default: its first model); else a model as for infer serve "
        f"(default: {DEFAULT_MODEL})",
    )
    parser.add_argument("--phase", help="the phase that serves it (default: the last)")
    parser.add_argument("--system", help="the system prompt")
    parser.add_argument("--temperature", type=_finite, help="default: the model's or the server's")
    parser.add_argument("--max-tokens", type=int, help="most tokens of an answer (default: as many as fit)")
    parser.add_argument("--seed", type=int, help="of the random numbers")
    return parser


def _exit(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _finite(text: str) -> float:
    """Return an option's number. JSON has neither infinity nor NaN."""
    if not math.isfinite(float(text)):
        raise argparse.ArgumentTypeError(f"{text} is not finite")
    return float(text)


def _whole_input() -> str:
    if sys.stdin is None:  # closed by the shell (`<&-`)
        return ""
    return sys.stdin.buffer.read().decode("utf-8-sig", "replace").strip()


@contextlib.contextmanager
def _server(options: argparse.Namespace, further: Sequence[str]) -> Iterator[str]:
    """Context manager that yields the address of the server to talk to. Without `--url`, starts and ends a server.

    Raises:
        StartupError: the server did not start. The message has what it printed last.
    """
    if options.url:
        yield options.url.rstrip("/").removesuffix("/v1")
        return
    from benchmarks.servers import RunningServer, Target
    from common.startup.phases import phase_names

    phase = options.phase or phase_names()[-1]
    model = options.model or DEFAULT_MODEL
    command = [sys.executable, "-m", "infer", "serve", phase, "--model", model]
    command += further
    say(f"starting {phase} with {model} …")
    # In a process group of its own: Ctrl-C stops an answer, not the server.
    target = Target(f"infer serve {phase}", 0, None, {}, program=tuple(command))
    with RunningServer(target, own_group=True) as server:
        yield server.url


def _client(url: str, api_key: str | None) -> httpx.Client:
    """Return a client of the API at an address. Raises StartupError if the address is none."""
    key = api_key or os.environ.get("INFER_API_KEY", "").partition(",")[0]
    try:
        return httpx.Client(
            base_url=f"{url}/v1/",
            headers=[(b"Authorization", b"Bearer " + os.fsencode(key))] if key else [],
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            trust_env=False,
        )
    except httpx.InvalidURL as error:
        raise StartupError(f"--url {url}: {error}") from None


def _first_model(client: httpx.Client) -> str:
    """Return the first model that a server lists. Raises StartupError if it lists none or does not answer."""
    try:
        response = client.get("models")
    except httpx.HTTPError as error:
        raise StartupError(f"{client.base_url} does not answer: {error or type(error).__name__}") from None
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return str(response.json()["data"][0]["id"])
    said = _message_of(response.text, response.status_code)
    raise StartupError(f"{client.base_url}models names no model ({said}); give --model")
