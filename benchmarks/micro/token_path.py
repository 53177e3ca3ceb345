"""The path of a request and its tokens through a server, from socket to socket: the time of each leg.

An unchanged server runs in this process. A client in another process sends one request at a time. The time is noted
at each of the marks below, and a leg is the part of the path between two marks. Both processes read the same clock.
The engine itself times the parts of its steps. While a token is between `handed` and `arrived`, the engine computes
the next token.

```text
client    sent                                                                            arrived
loop          called  submitted   queued                                 delivered  written
engine                                   taken  planned … committed  handed
```
"""

from __future__ import annotations

import asyncio
import http.client
import json
import multiprocessing
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import uvicorn

from benchmarks.servers import find_phase_module
from benchmarks.tables import Cell, MeasuredTable
from common.engine.engine import Engine
from common.engine.telemetry import Part
from common.hosting.async_engine import EngineWorker
from common.hosting.thread import EngineThread
from common.observing.step_parts import StepParts
from common.request import Request
from common.server.api.intake import Intake
from common.server.app import create_app
from common.server.http.backlogs import Backlog
from common.server.http.middleware import RequestIds
from common.server.http.sockets import bind
from common.startup.phases import find_phase

PROMPT = "Once upon a time there was a kind old bear who lived in the wood. " * 4
NEW_TOKENS = 32
TOKEN_EVENT = b"event: token"


class Leg(NamedTuple):
    """One timed part of a token's path through the server: from one mark (a point of the path) to the mark `until`.

    Attributes:
        until: the name of the mark at which the leg ends.
        where: the part of the server, and the work that it does, as the table shows them.
    """

    until: str
    where: str
    once: bool = False  # passed once by each request, before its first token


#: The legs, in the order in which a request and then each of its tokens passes them.
LEGS = (
    Leg("called", "socket, uvicorn: bytes to a call of the app", once=True),
    Leg("submitted", "routes, bodies: the body, read and checked", once=True),
    Leg("queued", "Intake: a place in the queue, token ids", once=True),
    Leg("taken", "EngineThread: from the event loop to the engine's thread", once=True),
    Leg("planned", "Scheduler: retire, make_room, admit, plan"),
    Leg("computed", "Runner.forward: tokens, positions, addresses, the forward pass"),
    Leg("sampled", "sample: logits to token ids"),
    Leg("committed", "Runner.commit: text, stop decisions, an output"),
    Leg("handed", "Engine.step, its end: books and telemetry"),
    Leg("delivered", "call_soon_threadsafe: from the engine's thread to the event loop"),
    Leg("written", "RequestStream, wire, Backlog: an output to an event, and its turn to be sent"),
    Leg("arrived", "EventStream, uvicorn, socket: into the client's hands"),
)

#: The parts of a step (`common.observing.step_parts`), and the mark at the end of each.
ENDS = {"plan": "planned", "pass": "computed", "sample": "sampled", "commit": "committed"}


class Marks:
    """The times at which each mark was passed, in the order of the tokens. Requests are served one at a time."""

    def __init__(self) -> None:
        self.times: defaultdict[str, list[float]] = defaultdict(list)

    def note(self, name: str, times: int = 1) -> None:
        self.times[name] += [time.monotonic()] * times

    def before(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that notes the time of the mark `name`, then calls `function`."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.note(name)
            return function(*args, **kwargs)

        return noted

    @contextmanager
    def on(self, worker: EngineWorker, thread: EngineThread) -> Iterator[None]:
        """Context manager: wrap functions of a running server, so that the time at each mark is noted."""
        engine = thread.engine
        add_request, hand_back = engine.add_request, thread._hand_back
        call, next_piece = RequestIds.__call__, Backlog.next_piece

        async def called(middleware: RequestIds, scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":  # other calls announce the app's start and end
                self.note("called")
            await call(middleware, scope, receive, send)

        def taken(request: Request) -> bool:
            added = add_request(request)
            self.note("taken")
            return added

        def handed(outputs: Any) -> None:
            self.note("handed", times=bool(outputs))
            hand_back(outputs)

        async def written(backlog: Backlog, *args: Any) -> bytes:
            piece = await next_piece(backlog, *args)
            self.note("written", times=piece.count(TOKEN_EVENT))  # all events since the previous piece
            return piece

        parts = StepParts(engine)
        parts.start()
        with (
            patch.object(RequestIds, "__call__", called),
            patch.object(Intake, "submit", self.before("submitted", Intake.submit)),
            patch.object(worker, "submit", self.before("queued", worker.submit)),
            patch.object(engine, "add_request", taken),
            patch.object(thread, "_hand_back", handed),
            patch.object(worker, "_deliver", self.before("delivered", worker._deliver)),
            patch.object(Backlog, "next_piece", written),
        ):
            yield
        self.note_steps(parts.take())

    def note_steps(self, parts: Iterable[Part]) -> None:
        """Note when each step began, and when its parts ended. A step that computes nothing does not count."""
        steps: list[list[Part]] = []
        for part in parts:
            if part.what == "plan":
                steps.append([])
            steps[-1].append(part)
        for step in steps:
            if any(part.what == "pass" for part in step):
                self.times["stepped"].append(step[0].began_s)
                for part in step:
                    self.times[ENDS[part.what]].append(part.ended_s)


def read_answers(port: int, body: bytes, requests: int) -> list[tuple[float, list[float]]]:
    """Send requests one after the other. Returns for each the time at which it was sent and the times at which its
    tokens arrived, in seconds of the monotonic clock."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.connect()
    found = []
    for _ in range(requests):
        sent_s, arrived = time.monotonic(), list[float]()
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        while chunk := response.read1():
            arrived += [time.monotonic()] * chunk.count(TOKEN_EVENT)
        found.append((sent_s, arrived))
    return found


async def serve_and_read(thread: EngineThread, body: bytes, requests: int, marks: Marks) -> None:
    """Serve a client in another process until it has all its answers. Times are added to `marks`."""
    worker, context = EngineWorker(thread), multiprocessing.get_context("spawn")
    with (
        bind("127.0.0.1", 0) as listener,
        marks.on(worker, thread),
        ProcessPoolExecutor(1, context) as client,
    ):
        app = create_app(thread.engine, worker=worker, model_name="measured")
        server = uvicorn.Server(uvicorn.Config(app, lifespan="on", ws="none", log_config=None))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        loop, port = asyncio.get_running_loop(), listener.getsockname()[1]
        answers = await loop.run_in_executor(client, read_answers, port, body, requests)
        server.should_exit = True
        await serving
    for sent_s, arrived in answers:
        marks.times["sent"].append(sent_s)
        marks.times["arrived"] += arrived


def legs_ms(marks: Marks, requests: int, skipped: int) -> list[list[Cell]]:
    """Return a row for each leg, and a row for their sum: median milliseconds of first tokens and of later tokens.

    Args:
        requests: the number of all requests.
        skipped: how many requests at the beginning are not counted.

    Raises:
        RuntimeError: a mark has more or fewer times than there were tokens (or requests, for a leg with `once`).
    """
    expected = {leg.until: requests * (1 if leg.once else NEW_TOKENS) for leg in LEGS}
    passed = {name: len(marks.times[name]) for name in expected}
    if passed != expected:
        raise RuntimeError(f"marks were passed {passed} times, expected {expected}")
    first: dict[str, list[float]] = defaultdict(list)
    later: dict[str, list[float]] = defaultdict(list)
    for request in range(skipped, requests):
        for token in range(NEW_TOKENS):
            place = request * NEW_TOKENS + token
            before = marks.times["stepped"][place] if token else marks.times["sent"][request]
            for leg in LEGS:
                if leg.once and token:
                    continue
                now = marks.times[leg.until][request if leg.once else place]
                (later if token else first)[leg.until].append((now - before) * 1e3)
                before = now
    rows: list[list[Cell]] = []
    for leg in LEGS:
        of_later = None if leg.once else statistics.median(later[leg.until])
        rows.append([f"{leg.until}: {leg.where}", statistics.median(first[leg.until]), of_later])
    whole = [[sum(each) for each in zip(*legs.values(), strict=True)] for legs in (first, later)]
    return [*rows, ["**all of it**", *(statistics.median(sums) for sums in whole)]]


def measure(engine: Callable[[], Engine], requests: int, skipped: int) -> list[list[Cell]]:
    """Build an engine with `engine`, serve `requests` requests after `skipped` others, and return the rows of
    `legs_ms`."""
    body = {"model": "measured", "prompt": PROMPT, "max_tokens": NEW_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True}
    thread, marks = EngineThread(engine), Marks()
    thread.build()
    asyncio.run(serve_and_read(thread, json.dumps(body).encode(), requests + skipped, marks))
    return legs_ms(marks, requests + skipped, skipped)


def legs(phase: str = "7", model: str = "dummy:llama-60m", requests: int = 30) -> Iterator[MeasuredTable]:
    """Time each leg of a token's path.

    Args:
        phase: a phase that reads a step's tokens before it starts the next step (4 to 8)
    """
    package = find_phase(find_phase_module(phase))
    config = package.Config(model=model, max_seq_len=512)
    yield MeasuredTable(
        name="token_path",
        title="one token's way through a server with one client",
        setup={
            "phase": package.PHASE.slug,
            "model": model,
            "median of": f"{requests} requests of {NEW_TOKENS} tokens",
        },
        columns=["until it is", "first token, ms", "each later token, ms"],
        rows=measure(lambda: package.build_engine(config), requests, skipped=3),
    )
