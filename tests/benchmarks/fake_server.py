"""A server that follows a script instead of a model, and records when it sent each token.

Runs in a thread (`FakeServer`), or as a process: `python fake_server.py --gap 0.005 --die-after 20`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TELEMETRY_PAGE = 2  # steps of one answer; readers must ask for more


@dataclass
class Script:
    """The behaviour of the server.

    Attributes:
        first_s: delay of the first token, in seconds.
        gap_s: delay of every other token, in seconds.
        style: `named` events like ours, or `plain` OpenAI chunks.
        faults: for requests by the first id of their prompt: refuse, error, drop, stall, short, empty, or json.
        die_after: the process ends without a message after this many tokens in all.
        limit: requests answered at the same time; others wait. None: no limit.
        telemetry: whether there is a /telemetry.
        token_ids: whether plain chunks have token ids.
    """

    first_s: float = 0.02
    gap_s: float = 0.004
    style: str = "named"
    faults: dict[int, str] = field(default_factory=dict)
    die_after: int | None = None
    limit: int | None = None
    telemetry: bool = True
    token_ids: bool = True


class FakeApp:
    """Serves requests as the script says, each on an HTTP/1.1 connection of its own."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.bodies: list[dict[str, Any]] = []
        self.received: dict[int, float] = {}  # first id of the prompt -> when the request had been read
        self.sent: dict[int, list[float]] = {}  # first id of the prompt -> when each token was written
        self.running = 0
        self.most_running = 0
        self.tokens = 0
        self.steps: list[dict[str, Any]] = []
        self._places = asyncio.Semaphore(script.limit) if script.limit else contextlib.nullcontext()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(
                    (
                        int(line.split(":")[1])
                        for line in head.splitlines()
                        if line.lower().startswith("content-length")
                    ),
                    0,
                )
                body = await reader.readexactly(length)
                path = head.split()[1]
                if path.startswith("/v1/completions"):
                    await self.complete(json.loads(body), writer)
                else:
                    self.answer(writer, path)
                await writer.drain()
        writer.close()

    def answer(self, writer: asyncio.StreamWriter, path: str) -> None:
        if path.startswith("/health"):
            body: Any = {"status": "ok"}
        elif path.startswith("/v1/models"):
            body = {"data": [{"id": "fake"}]}
        elif path.startswith("/telemetry") and self.script.telemetry:
            since = int(path.partition("since_step=")[2] or 0)
            names = ("decode_tokens", "prefill_tokens", "padded_tokens", "idle_rows")
            counters = {name: sum(step[name] for step in self.steps) for name in names}
            counters |= {"steps": len(self.steps), "preemptions": 0}
            counters["busy_s"] = sum(step["duration_s"] for step in self.steps)
            page = self.steps[since : since + TELEMETRY_PAGE]
            body = {"phase": "fake", "counters": counters, "steps": page, "next_step": since + len(page)}
        else:
            self.plain(writer, 404, {"error": {"message": "not found"}})
            return
        self.plain(writer, 200, body)

    @staticmethod
    def plain(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        writer.write(
            f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode()
            + data
        )

    async def complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        key = body["prompt"][0]
        self.bodies.append(body)
        self.received[key] = time.monotonic()
        fault = self.script.faults.get(key, "")
        if fault == "refuse":
            self.plain(writer, 503, {"error": {"message": "the queue\nis full", "type": "overloaded"}})
            return
        if fault == "json":
            self.plain(writer, 200, {"choices": [{"text": "all at once"}]})
            return
        async with self._places:
            self.running += 1
            self.most_running = max(self.running, self.most_running)
            try:
                await self.stream(key, body, fault, writer)
            finally:
                self.running -= 1

    async def stream(self, key: int, body: dict[str, Any], fault: str, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        asked = body["max_tokens"]
        count = {"short": asked - 1, "empty": 0}.get(fault, asked)
        sent = self.sent.setdefault(key, [])
        for index in range(count):
            await asyncio.sleep(self.script.first_s if index == 0 else self.script.gap_s)
            if index == count // 2 and fault == "drop":
                writer.transport.abort()
                return
            if index == count // 2 and fault == "stall":
                await asyncio.sleep(3600)
            if index == count // 2 and fault == "error":
                error = json.dumps({"error": {"message": "out of luck", "type": "server_error"}}).encode()
                name = b"event: error\n" if self.script.style == "named" else b""
                self.chunk(writer, name + b"data: " + error + b"\n\n")
                break
            if self.tokens == self.script.die_after:
                os._exit(7)
            self.tokens += 1
            sent.append(time.monotonic())
            self.chunk(writer, self.token(index))
            await writer.drain()
            self.steps.append(
                {
                    "step": len(self.steps),
                    "started_s": sent[-1] - 0.001,
                    "duration_s": 0.001,
                    "decode_tokens": int(index > 0),
                    "prefill_tokens": len(body["prompt"]) if index == 0 else 0,
                    "padded_tokens": 0,
                    "idle_rows": 1,
                    "kv_used_tokens": 10,
                    "kv_reserved_tokens": 40,
                }
            )
        else:
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
            self.chunk(writer, self.end(usage))
        writer.write(b"0\r\n\r\n")

    def token(self, index: int) -> bytes:
        text = "" if index % 3 == 2 else " a"  # every third token's text is held back
        choice = {"index": 0, "text": text, "finish_reason": None}
        if self.script.style == "named":
            event = {"choices": [choice], "token": text, "token_id": index}
            return b"event: token\ndata: " + json.dumps(event).encode() + b"\n\n"
        named = {"token_ids": [index]} if self.script.token_ids else {}
        return b"data: " + json.dumps({"choices": [choice | named]}).encode() + b"\n\n"

    def end(self, usage: dict[str, int]) -> bytes:
        choice = {"index": 0, "text": "", "finish_reason": "length"}
        if self.script.style == "named":
            done = {"choices": [choice], "finish_reason": "length", "usage": usage}
            return b"event: done\ndata: " + json.dumps(done).encode() + b"\n\n"
        events = ({"choices": [choice]}, {"choices": [], "usage": usage})
        return b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events) + b"data: [DONE]\n\n"

    @staticmethod
    def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


class FakeServer:
    """The app in a thread with an event loop of its own."""

    def __init__(self, script: Script | None = None) -> None:
        self.app = FakeApp(script or Script())
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.url = ""

    def _run(self) -> None:
        async def start() -> asyncio.Server:
            return await asyncio.start_server(self.app.handle, "127.0.0.1", 0)

        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(start())
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gap", type=float, default=0.001)
    parser.add_argument("--first", type=float, default=0.005)
    parser.add_argument("--die-after", type=int)
    parser.add_argument("--exit-at-once", type=int)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--deaf", type=int, help="1: SIGTERM is not heard")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--port", type=int)
    options, _ = parser.parse_known_args()
    if options.trace is not None:
        options.trace.write_text("traced")
    if options.exit_at_once is not None:
        print("error: --frobnicate is not possible here", file=sys.stderr)
        sys.exit(options.exit_at_once)

    async def serve() -> None:
        script = Script(options.first, options.gap, die_after=options.die_after, limit=options.limit)
        server = await asyncio.start_server(FakeApp(script).handle, "127.0.0.1", options.port)
        print("ready:", server.sockets[0].getsockname(), file=sys.stderr, flush=True)
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(15, (lambda: None) if options.deaf else stop.set)
        await stop.wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
