"""The engine's own process: answers are those of the engine alone, and if either process ends, both end cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import http.client
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from common.constrained.grammar import Grammar, Matcher
from common.errors import StartupError
from common.hosting.async_engine import AsyncEngine
from common.hosting.calls import EngineCalls
from common.hosting.process import EngineProcess
from common.llm import LLM
from common.request import SamplingParams
from common.startup.phases import find_phase
from tests.server.support import (
    BATCH,
    HANG_S,
    PHASES,
    QUEUE,
    ServerProcess,
    assert_error,
    called_from_python,
    engine_of,
    eventually,
    hold_a_full_batch,
    in_background,
    post,
    slow_but_on,
)

SLOW_GRAMMAR = {"structured_outputs": {"json": {"type": "integer", "multipleOf": 79_999}}}
MOST_COMPILING = 8  # requests whose grammars are compiled or wait for it


def has_ended(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


@contextlib.contextmanager
def suspended(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


#: Both processes treat all phases alike. The last one yields several tokens of a request in one message.
@pytest.fixture(scope="module", params=slow_but_on("phase7_chunked", of=PHASES[-1:]))
def phase(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def start_split(phase: str, *flags: str) -> ServerProcess:
    """A gated server whose engine has a process of its own."""
    limits = "--max-batch-size", str(BATCH), "--max-waiting-requests", str(QUEUE)
    return ServerProcess(
        phase, *limits, *called_from_python(phase), *flags, module="tests.server.gated_server"
    )


@pytest.fixture(scope="module")
def shared_split(phase: str) -> Iterator[ServerProcess]:
    with start_split(phase) as server:
        yield server
        assert "Traceback" not in "".join(server.log)


@pytest.fixture
def split(shared_split: ServerProcess) -> Iterator[ServerProcess]:
    shared_split.begin_test()
    yield shared_split
    shared_split.order("open")
    shared_split.assert_serves()


@pytest.fixture
def mortal_split(phase: str) -> Iterator[ServerProcess]:
    with start_split(phase) as server:
        yield server


# ---------------------------------------------------------------------- answers

#: Requests, as fields of a body and as parameters of an engine.
REQUESTS: list[tuple[dict[str, Any], SamplingParams]] = [
    ({"max_tokens": 40}, SamplingParams(max_new_tokens=40, temperature=0)),
    (
        {"max_tokens": 40, "temperature": 1, "seed": 5, "top_p": 0.9},
        SamplingParams(max_new_tokens=40, seed=5, top_p=0.9),
    ),
    (
        {"max_tokens": 30, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        SamplingParams(max_new_tokens=30, temperature=0, repetition_penalty=1.3, presence_penalty=0.5),
    ),
    (
        {"max_tokens": 60, "stop": ["the"], "include_stop_str_in_output": True},
        SamplingParams(max_new_tokens=60, temperature=0, stop=("the",), include_stop_str_in_output=True),
    ),
    (
        {"max_tokens": 12, "ignore_eos": True, "structured_outputs": {"regex": "[a-z ]+"}},
        SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True, grammar=Grammar.regex("[a-z ]+")),
    ),
    (
        {"max_tokens": 30, "bad_words": ["the", "was"], "min_tokens": 5},
        SamplingParams(max_new_tokens=30, temperature=0, bad_words=("the", "was"), min_tokens=5),
    ),
]


def test_answers_are_those_of_an_engine_without_a_server(split: ServerProcess, phase: str) -> None:
    llm = LLM("zoo:llama-tiny", phase=phase, device="cpu", dtype="float32")
    prompt = "Once upon a time"
    expected = llm.generate([prompt] * len(REQUESTS), [params for _, params in REQUESTS], progress=False)
    answers = in_background(
        len(REQUESTS), lambda number: post(split, prompt=prompt, **REQUESTS[number][0]).json()
    )
    for answer, completion in zip(answers, expected, strict=True):
        (choice,) = answer.result(HANG_S)["choices"]
        assert choice["text"] == completion.text
        assert answer.result()["usage"]["completion_tokens"] == completion.completion_tokens


def test_a_stop_string_ends_the_request_in_the_engine(split: ServerProcess) -> None:
    text = split.text(max_tokens=200, ignore_eos=True)
    word = text.split()[20]
    expected = text[: text.index(word)]
    choice = split.complete(max_tokens=200, ignore_eos=True, stop=[word])["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
    eventually(lambda: split.counters()["requests_finished"] == 2)
    assert split.counters()["requests_cancelled"] == 0
    assert split.counters()["decode_tokens"] < 300, "it was not computed to its length"


# ---------------------------------------------------------------------- load


def test_the_front_answers_and_counts_while_a_pass_runs(split: ServerProcess) -> None:
    batch = hold_a_full_batch(split)
    for path in ("/health", "/ready", "/version", "/metrics", "/telemetry", "/v1/models"):
        assert split.client.get(path).status_code == 200
    crowd = in_background(QUEUE + 3, lambda _: post(split))
    eventually(lambda: sum(each.done() for each in crowd) == 3)
    for each in crowd:
        if each.done():
            assert_error(each.result(), 503, None, "queue_full")
    assert "vllm:num_requests_waiting{" in split.client.get("/metrics").text
    split.order("open")
    assert [each.result(HANG_S).status_code for each in crowd].count(200) == QUEUE
    assert batch.result(HANG_S).status_code == 200
    assert split.counters()["requests_finished"] == BATCH + QUEUE


def test_a_client_that_leaves_frees_its_place(split: ServerProcess) -> None:
    with split.streaming(max_tokens=1500, ignore_eos=True) as events:
        next(events)
    eventually(lambda: split.counters()["requests_cancelled"] == 1)
    eventually(lambda: split.client.get("/telemetry").json()["steps"][-1]["active"] == 0)


def test_slow_grammars_hold_no_places_and_those_of_clients_that_leave_are_dropped(
    split: ServerProcess,
) -> None:
    split.complete(max_tokens=4, **SLOW_GRAMMAR)  # from now on it is known that the grammar is slow
    room = split.queue_room()
    with suspended(engine_of(split.process.pid)):  # no grammar is compiled
        asked = {split.raw(max_tokens=4, **SLOW_GRAMMAR) for _ in range(MOST_COMPILING + 1)}
        refused = select.select(asked, [], [], HANG_S)[0][0]
        answer = http.client.HTTPResponse(refused)
        answer.begin()
        assert answer.status == 503
        assert b'"compiling_busy"' in answer.read()
        assert split.queue_room() == room
        for each in asked:
            each.close()
        eventually(lambda: split.log_text.count("dropped: the client left") == MOST_COMPILING)
    split.complete(max_tokens=4, **SLOW_GRAMMAR)
    assert split.counters()["requests_added"] == 2


def count_matchers(_: EngineCalls) -> int:
    return sum(type(each) is Matcher for each in gc.get_objects())


@pytest.mark.anyio
async def test_a_matcher_that_no_request_needs_is_dropped() -> None:
    package = find_phase("phase5_continuous")
    config = package.Config(device="cpu", dtype="float32")
    engine = AsyncEngine(EngineProcess(functools.partial(package.build_engine, config), gc.enable))
    engine.build()
    engine.start()
    try:
        for _ in range(20):
            await asyncio.to_thread(engine.maker.grammars.new_matcher, Grammar.regex("[ab]"))
        assert await asyncio.wrap_future(engine.call(count_matchers)) < 5
    finally:
        await engine.stop()


# ---------------------------------------------------------------------- steps that are watched


def test_the_live_view_and_traces_come_from_the_engines_process(split: ServerProcess) -> None:
    with split.client.stream("GET", "/steps") as viewer:
        lines = viewer.iter_lines()
        assert next(lines) == "event: begin"
        answer = in_background(1, lambda _: post(split, max_tokens=50, ignore_eos=True))[0]
        assert any(line.startswith("data: ") and '"key":true' in line for line in lines)
        assert answer.result(HANG_S).status_code == 200
    recording = in_background(1, lambda _: split.client.get("/trace?seconds=1").json())[0]
    eventually(lambda: bool(post(split, max_tokens=3)) and recording.done())
    assert {event["name"] for event in recording.result()} >= {"plan", "first token"}


# ---------------------------------------------------------------------- the end of a process


@pytest.mark.parametrize("asks", ["request", "grammar", "call"])
def test_a_process_that_is_stopped_while_it_is_idle_is_unwell_until_it_goes_on(phase: str, asks: str) -> None:
    """It begins no step, so the time counts from the request, the grammar or the call that it does not take."""
    with start_split(phase, "--step-timeout", "1.5") as server:
        server.complete(max_tokens=4, **SLOW_GRAMMAR)
        server.begin_test()
        time.sleep(0.5)  # until the engine's process has said that it waits for work
        with suspended(engine_of(server.process.pid)):
            time.sleep(2)  # longer than the timeout, but the engine owes nothing
            assert server.client.get("/health").status_code == 200
            ask = {
                "request": lambda _: post(server),
                "grammar": lambda _: post(server, max_tokens=4, **SLOW_GRAMMAR),
                "call": lambda _: server.client.post("/reset_prefix_cache", json={}),
            }[asks]
            (answer,) = in_background(1, ask)
            for path in ("/health", "/ready"):
                eventually(lambda path=path: server.client.get(path).status_code == 503)
                assert_error(server.client.get(path), 503, None, "engine_stuck")
        assert answer.result(HANG_S).status_code == 200
        assert server.client.get("/health").status_code == 200
        server.assert_serves()


def test_a_process_that_stays_stopped_ends_with_its_server(mortal_split: ServerProcess) -> None:
    server, engine = mortal_split, engine_of(mortal_split.process.pid)
    engine.suspend()
    server.signal()
    assert server.wait() == 0
    assert has_ended(engine)
    server.read_the_rest()
    assert "the engine's process did not end within 5 s, and was killed" in server.log_text


def test_a_killed_engine_ends_every_request_with_an_error(mortal_split: ServerProcess) -> None:
    server = mortal_split
    engine = engine_of(server.process.pid)
    with server.streaming(max_tokens=4000, ignore_eos=True) as events:
        received = [next(events) for _ in range(5)]
        hold = in_background(BATCH + 2, lambda _: post(server, max_tokens=4000, ignore_eos=True))
        eventually(lambda: server.counters()["requests_added"] == BATCH + 3)
        with suspended(engine):
            grammars = in_background(MOST_COMPILING + 1, lambda _: post(server, **SLOW_GRAMMAR))
            eventually(lambda: sum(each.done() for each in grammars) == 1)  # refused: the others wait
            engine.kill()
        received += events
    name, data = received[-1]
    assert (name, data["error"]["code"]) == ("error", "engine_dead")
    assert "killed by SIGKILL" in data["error"]["message"]
    answers = [each.result(HANG_S) for each in (*hold, *grammars)]
    assert sum("compiling_busy" in answer.text for answer in answers) == 1
    for answer in answers:
        if "compiling_busy" not in answer.text:
            assert_error(answer, 503, None, "engine_dead")
    for path in ("/health", "/ready"):
        assert_error(server.client.get(path), 503, None, "engine_dead")
    assert_error(server.post(), 503, None, "engine_dead")
    assert_error(server.client.post("/reset_prefix_cache", json={}), 503, None, "engine_dead")
    assert_error(server.client.get("/trace?seconds=1"), 503, None, "engine_dead")
    metrics = server.client.get("/metrics").text
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert re.search(rf"^vllm:{gauge}{{.*}} 0.0$", metrics, re.MULTILINE), (
            "the engine has no requests any more"
        )
    assert re.search(rf"^infer:requests_failed_total{{.*}} {BATCH + 3}.0$", metrics, re.MULTILINE)
    server.signal()
    assert server.wait() == 0
    server.read_the_rest()
    assert "Traceback" not in server.log_text
    assert f"and {len(received) - 1} new tokens" in server.log_text


@pytest.mark.parametrize("computes", [False, True])
def test_a_killed_front_leaves_no_engine_behind(mortal_split: ServerProcess, computes: bool) -> None:
    engine = engine_of(mortal_split.process.pid)
    if computes:
        hold_a_full_batch(mortal_split)
    mortal_split.process.kill()
    eventually(lambda: has_ended(engine))


def test_ctrl_c_is_one_good_end_for_both(phase: str) -> None:
    """A terminal sends SIGINT to every process of the command. Both end without an error."""
    command = [sys.executable, "-m", phase, "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        log = []
        for line in process.stderr:
            log.append(line)
            if "ready: " in line:
                engine = engine_of(process.pid)
                os.killpg(process.pid, signal.SIGINT)
        assert process.wait(HANG_S) == 0
    assert "SIGINT: finishing what runs" in log[-1]
    assert has_ended(engine)


def test_ctrl_c_while_the_engine_is_built(phase: str) -> None:
    command = [sys.executable, "-m", phase, "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        engine = engine_of(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(HANG_S) == 130
        assert process.stderr is not None
        # The engine's process may still write a line after it.
        assert "interrupted" in process.stderr.read().splitlines()
    eventually(lambda: has_ended(engine))


# ---------------------------------------------------------------------- the start


@pytest.mark.parametrize(
    ("make_engine", "says"),
    [
        (functools.partial(os._exit, 3), "ended with exit code 3 before the engine was built"),
        (functools.partial(int, "no engine"), "could not be built: ValueError: invalid literal"),
    ],
)
def test_an_engine_that_cannot_be_built_is_one_line(make_engine: Callable[[], Any], says: str) -> None:
    with pytest.raises(StartupError, match=says):
        EngineProcess(make_engine, functools.partial(os.nice, 0)).build()
