"""Thousands of requests of mixed kinds against each phase, many of them cancelled: none may be lost.

`python -m tests.soak.program [--phase 7 9] [--requests 10000] [--clients 32]`

| share | kind | must end with |
| ---: | --- | --- |
| 40 % | cancelled: the connection is closed at a moment drawn by chance | counted as cancelled or finished, once |
| 5 % | malformed: no JSON, a wrong type, an unknown field or model, more than fits | a refusal that names it |
| 1 % | slow readers: some take a second for their answer | their whole answer |
| the rest | streamed or whole, greedy or not, penalties, grammars, two choices | an answer; if greedy, as alone |

Before and after, the program reads the server's telemetry, files, threads and memory. All the time it asks for
`/health`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import psutil
from rich.console import Console

from benchmarks.results import LOCAL
from benchmarks.servers import RunningServer, Target, find_phase_module
from benchmarks.tables import Cell, MeasuredTable
from common.startup.phases import phase_names
from tests.support.servers import asking_for_health

MODEL = "zoo:llama-tiny"
OPTIONS = {
    "model": MODEL,
    "max-batch-size": "16",
    "max-seq-len": "256",
    "max-waiting-requests": "256",
}
CANCELLED, MALFORMED, SLOW = 0.40, 0.05, 0.01  # shares
SETTLE_S = 30.0  # until the server has noticed and counted all clients that left
PROMPTS = [
    "Once upon a time",
    "The fox",
    "A little girl",
    "One day, Tim",
    "Sue and the bear",
    "In the garden",
]


@dataclass(frozen=True, slots=True)
class State:
    """The state of an idle server."""

    counters: dict[str, float]
    queue_room: int
    reserved_tokens: int
    files: int
    threads: int
    memory_bytes: int


@dataclass(slots=True)
class Tally:
    """The outcomes of the requests.

    Attributes:
        ends: number of requests by kind of end, as clients saw it.
        wrong: descriptions of errors.
        health_s: seconds of each `/health`.
    """

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)

    def seconds(self, share: float) -> float:
        """Return the seconds within which this share of all `/health` requests was answered."""
        ordered = sorted(self.health_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def state_of(client: httpx.Client, pid: int) -> State:
    """Return the server's state once all requests have ended, or after `SETTLE_S` seconds."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        told = client.get("/telemetry").json()
        counters = told["counters"]
        ended = sum(counters[f"requests_{end}"] for end in ("finished", "failed", "cancelled"))
        reserved = told["steps"][-1]["kv_reserved_tokens"] if told["steps"] else 0
        if (ended == counters["requests_added"] and not reserved) or time.monotonic() > deadline:
            break
        # One more request, so that the last recorded step comes after all other requests.
        client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "stream": False, "model": MODEL})
    process = psutil.Process(pid)
    return State(
        counters=counters,
        queue_room=told["queue_room"],
        reserved_tokens=reserved,
        files=process.num_fds(),
        threads=process.num_threads(),
        memory_bytes=process.memory_info().rss,
    )


# ---------------------------------------------------------------------- requests


def greedy_bodies() -> Iterator[dict[str, Any]]:
    """Yield greedy requests, whose answers must be the same alone and beside others."""
    for i, prompt in enumerate(PROMPTS * 4):
        yield {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 4 + 5 * (i % 9)}


def drawn_body(draw: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": draw.choice(PROMPTS) + draw.choice(["", " again", " and again" * draw.randrange(20)]),
        "max_tokens": draw.randrange(1, 48),
        "temperature": draw.choice([0.3, 0.8, 1.3]),
        "seed": draw.randrange(1000),
    }
    body |= draw.choice(
        [
            {"stop": [".", "and"]},
            {"presence_penalty": 0.6, "frequency_penalty": 0.4},
            {"logprobs": 3},
            {"top_p": 0.8, "top_k": 20},
            {"n": 2},
            {"structured_outputs": {"regex": "[a-z ]{4,12}"}},
            {},
        ]
    )
    return body


def malformed(draw: random.Random) -> bytes | dict[str, Any]:
    good = {"model": MODEL, "prompt": "x", "max_tokens": 4}
    wrong: list[bytes | dict[str, Any]] = [
        b"{",
        b"\xff\xfe",
        b"[]",
        good | {"max_tokens": "many"},
        good | {"temperature": -1},
        good | {"model": "another"},
        good | {"logprobs": 99},
        good | {"prompt": [5] * 400},
        good | {"structured_outputs": {"regex": "("}},
    ]
    return draw.choice(wrong)


class Clients:
    """Sends requests from `count` clients at a time, and checks their answers."""

    def __init__(self, url: str, count: int, seed: int) -> None:
        self.tally = Tally()
        self._url = url
        self._count = count
        self._seed = seed
        self._known: list[tuple[dict[str, Any], str]] = []

    async def run(self, requests: int) -> Tally:
        """Send `requests` requests, and wait until all have ended."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=120.0, limits=limits) as client:
            for body in greedy_bodies():  # one after the other, so each is alone
                answer = await client.post("/v1/completions", json=body | {"stream": False})
                self._known.append((body, answer.json()["choices"][0]["text"]))
            numbers = iter(range(requests))

            async def work() -> None:
                for number in numbers:
                    await self._one(client, random.Random(f"{self._seed}:{number}"))

            await asyncio.gather(*(work() for _ in range(self._count)))
        return self.tally

    async def _one(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        kind = draw.random()
        try:
            if kind < CANCELLED:
                await self._cancel(client, draw)
            elif kind < CANCELLED + MALFORMED:
                await self._refused(client, draw)
            elif kind < CANCELLED + MALFORMED + SLOW:
                await self._read_slowly(client, draw)
            elif draw.random() < 0.6:
                body, text = draw.choice(self._known)
                got = await self._answer(client, body, stream=draw.random() < 0.7)
                self._expect(got == text, f"{body} gave {got!r}, alone {text!r}")
                self.tally.ends["answered"] += 1
            else:
                await self._answer(client, drawn_body(draw), stream=draw.random() < 0.7)
                self.tally.ends["answered"] += 1
        except Exception as error:
            self._expect(False, f"{type(error).__name__}: {error}")

    def _expect(self, held: bool, otherwise: str) -> None:
        if not held:
            self.tally.wrong.append(otherwise)

    async def _answer(
        self,
        client: httpx.AsyncClient,
        body: dict[str, Any],
        *,
        stream: bool,
        pause_s: Callable[[], float] | None = None,
    ) -> str:
        """Return the text of choice 0. `pause_s` returns the seconds to wait after each line of a stream."""
        if not stream:
            answer = await client.post("/v1/completions", json=body | {"stream": False})
            self._expect(answer.status_code == 200, answer.text)
            return str(answer.json()["choices"][0]["text"])
        texts: list[str] = []
        ended = 0
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            name = ""
            async for line in response.aiter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                    ended += name == "done"
                    self._expect(name in ("token", "done"), f"{body}: event {name}")
                elif line.startswith("data: ") and name == "token":
                    choice = orjson.loads(line.removeprefix("data: "))["choices"][0]
                    texts.append(choice["text"] if choice["index"] == 0 else "")
                if pause_s is not None:
                    await asyncio.sleep(pause_s())
        self._expect(ended == body.get("n", 1), f"{body}: {ended} ends")
        return "".join(texts)

    async def _cancel(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """Send a request, and close its connection at a random moment."""
        body = drawn_body(draw) | {"max_tokens": draw.randrange(20, 120), "stream": draw.random() < 0.7}

        async def asked() -> None:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for _ in response.aiter_bytes():
                    pass

        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asked(), draw.choice([0.002, 0.02, 0.1, 0.3]) * draw.random())
        self.tally.ends["cancelled"] += 1

    async def _refused(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        body = malformed(draw)
        sent = {"content": body} if isinstance(body, bytes) else {"json": body}
        answer = await client.post("/v1/completions", headers={"content-type": "application/json"}, **sent)
        self._expect(400 <= answer.status_code < 500, f"{body!r}: {answer.status_code}")
        self._expect(bool(answer.json()["error"]["message"]), f"{body!r}: no reason")
        self.tally.ends["refused"] += 1

    async def _read_slowly(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        body, text = self._known[8]
        got = await self._answer(client, body, stream=True, pause_s=lambda: draw.random() / 100)
        self._expect(got == text, f"a slow reader got {got!r}, alone {text!r}")
        self.tally.ends["answered"] += 1


# ---------------------------------------------------------------------- the program


def soak(phase: str, requests: int, clients: int) -> tuple[Tally, State, State, float]:
    """Run the soak on a phase. Returns the outcomes, the server's state before and after, and the seconds."""
    with RunningServer(Target(phase, 0, find_phase_module(phase), dict(OPTIONS))) as server:
        pid = server.pid
        with httpx.Client(base_url=server.url, timeout=60.0) as client:
            # A first run makes everything that a server makes only once, which is no leak.
            asyncio.run(Clients(server.url, clients, seed=1).run(max(100, requests // 10)))
            before = state_of(client, pid)
            began = time.monotonic()
            work = Clients(server.url, clients, seed=0)
            with asking_for_health(server.url) as health:
                tally = asyncio.run(work.run(requests))
            tally.health_s = [answer.elapsed.total_seconds() for answer in health]
            tally.wrong += [
                f"/health: {answer.status_code}" for answer in health if answer.status_code != 200
            ]
            taken_s = time.monotonic() - began
            after = state_of(client, pid)
    if server.exit_code != 0:
        tally.wrong.append(f"the server ended with {server.exit_code}")
    return tally, before, after, taken_s


def row_of(phase: str, tally: Tally, before: State, after: State, taken_s: float) -> dict[str, Cell]:
    counted = {name: after.counters[name] - before.counters[name] for name in after.counters}
    ended = sum(counted[f"requests_{end}"] for end in ("finished", "failed", "cancelled"))
    held = after.counters["reclaimed_slots"] + after.reserved_tokens + before.queue_room - after.queue_room
    return {
        "phase": phase,
        "answered": tally.ends["answered"],
        "cancelled by the client": tally.ends["cancelled"],
        "refused": tally.ends["refused"],
        "wrong or missing": len(tally.wrong) + int(counted["requests_failed"]),
        "ended on the server": f"{ended:.0f} of {counted['requests_added']:.0f}",
        "held for nobody": int(held),
        "files": after.files - before.files,
        "threads": after.threads - before.threads,
        "memory, %": 100 * (after.memory_bytes / before.memory_bytes - 1),
        "/health p50, ms": statistics.median(tally.health_s) * 1e3,
        "p99, ms": tally.seconds(0.99) * 1e3,
        "seconds": taken_s,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 1 if any request was lost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--phase", nargs="+", default=phase_names(), help="numbers or names (all)")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=32, help="at a time")
    parser.add_argument("--out", type=Path, default=LOCAL, help=f"folder for results ({LOCAL})")
    options = parser.parse_args(arguments)
    console = Console()
    rows, lost = [], False
    for phase in options.phase:
        tally, before, after, taken_s = soak(phase, options.requests, options.clients)
        rows.append(row_of(phase, tally, before, after, taken_s))
        for wrong in tally.wrong[:10]:
            console.print(f"phase {phase}: {wrong}", markup=False)
        lost = lost or bool(tally.wrong)
    table = MeasuredTable(
        name="soak",
        title="many requests, many of them left in the middle",
        setup={
            "model": MODEL,
            "requests": f"{options.requests} to each phase, {options.clients} at a time",
            "after": "a tenth as many that are not counted",
        },
        columns=list(rows[0]),
        rows=[list(row.values()) for row in rows],
    )
    table.publish(options.out, console)
    return int(lost)


if __name__ == "__main__":
    raise SystemExit(main())
