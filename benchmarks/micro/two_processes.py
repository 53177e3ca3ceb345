"""A server of one process against one whose engine has a process of its own, with many streams of the tiny model.

The model is so small that a step is mostly host work: planning, text, events, HTTP. Each stream is the answer to
one request, and all streams begin together. The client is this process. It only counts the tokens that arrive.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import httpx
import psutil

from benchmarks.micro import medians, say
from benchmarks.servers import RunningServer, Target, find_phase_module
from benchmarks.tables import MeasuredTable

MODEL = "zoo:llama-tiny"
TOKEN_EVENT = b"event: token"
THREADS = 1  # compute threads of the engine
FORMS = {"off": "one process", "on": "two processes"}


class Found(NamedTuple):
    """The rate and the times of one run."""

    tokens_per_s: float
    between_steps_ms: float  # from the start of a step to the start of the next
    step_ms: float  # a step of the engine
    front_ms: float  # processor time per step, of the process that speaks HTTP (or of the only process)
    engine_ms: float  # processor time per step, of the engine's process; 0 if there is only one process


def target_of(phase: str, form: str, streams: int, new_tokens: int) -> Target:
    """Return how to start a server with `--engine-process` `on` or `off`, with a seat for every stream."""
    options = {"model": MODEL, "port": "0", "device": "cpu", "dtype": "float32"}
    options |= {"engine-process": form, "max-batch-size": str(streams), "max-seq-len": str(2 * new_tokens)}
    options |= {"max-waiting-requests": str(streams), "log-level": "info"}
    environment = {"OMP_NUM_THREADS": str(THREADS)}
    return Target(FORMS[form], 0, find_phase_module(phase), options, environment=environment)


async def count_tokens(url: str, body: bytes) -> int:
    """Send one request, and return how many token events came until the server closed the connection."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    found, rest = 0, b""
    while piece := await reader.read(2**16):
        piece = rest + piece
        found += piece.count(TOKEN_EVENT)
        rest = piece[1 - len(TOKEN_EVENT) :]  # the beginning of an event, perhaps
    writer.close()
    return found


async def read_all(url: str, bodies: Sequence[bytes]) -> int:
    return sum(await asyncio.gather(*(count_tokens(url, body) for body in bodies)))


def processor_s(server: RunningServer) -> list[float]:
    """Return the processor time of the server's process and of its engine's process (0 without one), in seconds."""
    process = psutil.Process(server.pid)
    engine = [each for each in process.children() if "hosting.child" in " ".join(each.cmdline())]
    times = [sum(each.cpu_times()[:2]) for each in (process, *engine)]
    return times if engine else [*times, 0.0]


def full_steps(steps: Sequence[dict[str, Any]], streams: int) -> list[tuple[float, float]]:
    """Return the time to the next step's start and the duration, in seconds, of each step in which all streams
    decode, if they also decode in the next step."""
    return [
        (after["started_s"] - step["started_s"], step["duration_s"])
        for step, after in itertools.pairwise(steps)
        if step["decode_tokens"] == after["decode_tokens"] == streams
    ]


def run(target: Target, streams: int, new_tokens: int) -> Found:
    """Start a server and run all streams at once. Returns the rate of tokens and the times of steps."""
    body = {"prompt": "Once upon a time", "max_tokens": new_tokens, "ignore_eos": True, "stream": True}
    with RunningServer(target) as server, httpx.Client(base_url=server.url) as client:
        bodies = [
            json.dumps(body | {"model": server.model, "seed": number}).encode() for number in range(streams)
        ]
        asyncio.run(read_all(server.url, bodies[:8]))  # warms up
        first = client.get("/telemetry").json()["next_step"]
        before_s, began_s = processor_s(server), time.monotonic()
        tokens = asyncio.run(read_all(server.url, bodies))
        seconds = time.monotonic() - began_s
        spent_s = [after - before for after, before in zip(processor_s(server), before_s, strict=True)]
        steps: list[dict[str, Any]] = []
        while page := client.get("/telemetry", params={"since_step": first}).json():
            if not page["steps"]:
                break
            steps, first = steps + page["steps"], page["next_step"]
    if tokens != streams * new_tokens:
        raise RuntimeError(f"{tokens} tokens came, expected {streams * new_tokens}")
    full = full_steps(steps, streams)
    between_s, step_s = (statistics.median(each) for each in zip(*full, strict=True))
    front_s, engine_s = (each / len(steps) for each in spent_s)
    return Found(tokens / seconds, between_s * 1e3, step_s * 1e3, front_s * 1e3, engine_s * 1e3)


def compare(
    phase: str = "7", streams: tuple[int, ...] = (64, 256), new_tokens: int = 100, turns: int = 3
) -> Iterator[MeasuredTable]:
    """Measure a server with one process and a server with two processes, in turns.

    Args:
        phase: number, word or module
        streams: numbers of streams
        new_tokens: tokens of each answer
        turns: runs of each server; medians are shown
    """
    table = MeasuredTable(
        name="two_processes",
        title="one process against two",
        setup={
            "phase": find_phase_module(phase),
            "model": MODEL,
            "answers": f"{new_tokens} tokens each",
            "threads that compute": str(THREADS),
            "cores": str(os.cpu_count()),
            "client": "a third process on the same cores",
            "median of": f"{turns} turns",
        },
        columns=[
            *("streams", "server", "tokens / s", "step to step, ms", "engine's step, ms"),
            *("processor time a step: front, ms", "engine's process, ms"),
        ],
        rows=[],
    )
    for count in streams:
        found: dict[str, list[Found]] = {form: [] for form in FORMS}
        for turn in range(turns):
            for form in FORMS:
                found[form].append(run(target_of(phase, form, count, new_tokens), count, new_tokens))
                say(f"{count} streams, turn {turn + 1}, {FORMS[form]}: {found[form][-1]}")
        for form, each in found.items():
            *numbers, engine_ms = medians(each)
            table.rows.append([count, FORMS[form], *numbers, engine_ms or None])
        yield table
