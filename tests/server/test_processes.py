"""A server's two processes: what crosses between them, what happens if one hangs or ends, and their threads."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from common.constrained.grammar import Grammar, Matcher
from common.errors import StartupError
from common.hosting import process
from common.hosting.process import EngineProcess
from common.llm import LLM
from common.request import SamplingParams
from tests.support.engines import build, working
from tests.support.forked import FORKS
from tests.support.servers import (
    BATCH,
    HANG_S,
    ServerProcess,
    assert_error,
    called_from_python,
    engine_of,
    eventually,
    hold_a_full_batch,
    in_background,
)

SLOW_GRAMMAR = {"structured_outputs": {"json": {"type": "integer", "multipleOf": 30_011}}}
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


def test_answers_are_those_of_an_engine_without_a_server(gated: ServerProcess, phase: str) -> None:
    llm = LLM("zoo:llama-tiny", phase=phase, device="cpu", dtype="float32")
    prompt = "Once upon a time"
    expected = llm.generate([prompt] * len(REQUESTS), [params for _, params in REQUESTS], progress=False)
    answers = in_background(
        len(REQUESTS), lambda number: gated.post(prompt=prompt, **REQUESTS[number][0]).json()
    )
    for answer, completion in zip(answers, expected, strict=True):
        (choice,) = answer.result(HANG_S)["choices"]
        assert choice["text"] == completion.text
        assert answer.result()["usage"]["completion_tokens"] == completion.completion_tokens


def test_a_stop_string_ends_the_request_in_the_engine(gated: ServerProcess) -> None:
    text = gated.text(max_tokens=200, ignore_eos=True)
    word = text.split()[20]
    expected = text[: text.index(word)]
    choice = gated.complete(max_tokens=200, ignore_eos=True, stop=[word])["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
    eventually(lambda: gated.counters()["requests_finished"] == 2)
    assert gated.counters()["requests_cancelled"] == 0
    assert gated.counters()["decode_tokens"] < 300, "it was not computed to its length"


# ---------------------------------------------------------------------- grammars


def count_matchers() -> int:
    gc.collect()  # those of earlier tests, in reference cycles
    return sum(type(each) is Matcher for each in gc.get_objects())


@pytest.mark.anyio
async def test_a_matcher_that_no_request_needs_is_dropped() -> None:
    before = count_matchers()
    async with working(build("continuous")) as engine:
        for _ in range(20):
            await asyncio.to_thread(engine.maker.grammars.new_matcher, Grammar.regex("[ab]"))
        assert count_matchers() - before < 5


# ---------------------------------------------------------------------- the end of a process


@pytest.mark.slow
def test_a_process_that_is_stopped_while_it_is_idle_is_unwell_until_it_goes_on(phase: str) -> None:
    """It begins no step, so the time counts from the request, the grammar or the call that it does not take."""
    asks: list[Callable[[ServerProcess], httpx.Response]] = [
        ServerProcess.post,
        lambda server: server.post(max_tokens=4, **SLOW_GRAMMAR),
        lambda server: server.client.post("/reset_prefix_cache", json={}),
    ]
    with ServerProcess(phase, "--step-timeout", "1") as server:
        server.complete(max_tokens=4, **SLOW_GRAMMAR)
        for ask in asks:
            server.begin_test()
            time.sleep(0.5)  # until the engine's process has said that it waits for work
            with suspended(engine_of(server.process.pid)):
                time.sleep(1.5)  # longer than the timeout, but the engine owes nothing
                assert server.client.get("/health").status_code == 200
                (answer,) = in_background(1, lambda _, ask=ask: ask(server))
                for path in ("/health", "/ready"):
                    eventually(lambda path=path: server.client.get(path).status_code == 503)
                    assert_error(server.client.get(path), 503, None, "engine_stuck")
            assert answer.result(HANG_S).status_code == 200
            assert server.client.get("/health").status_code == 200
            server.assert_serves()


@pytest.mark.slow
def test_a_process_that_stays_stopped_ends_with_its_server(mortal: ServerProcess) -> None:
    server, engine = mortal, engine_of(mortal.process.pid)
    engine.suspend()
    server.signal()
    assert server.process.wait(HANG_S) == 0
    assert has_ended(engine)
    server.wait()
    assert "the engine's process did not end within 5 s, and was killed" in server.log_text


def test_a_killed_engine_ends_every_request_with_an_error(mortal: ServerProcess) -> None:
    server = mortal
    engine = engine_of(server.process.pid)
    with server.streaming(max_tokens=4000, ignore_eos=True) as events:
        received = [next(events) for _ in range(5)]
        hold = in_background(BATCH + 2, lambda _: server.post(max_tokens=4000, ignore_eos=True))
        eventually(lambda: server.counters()["requests_added"] == BATCH + 3)
        with suspended(engine):
            grammars = in_background(MOST_COMPILING + 1, lambda _: server.post(**SLOW_GRAMMAR))
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
    assert "Traceback" not in server.log_text
    assert f"and {len(received) - 1} new tokens" in server.log_text


@pytest.mark.slow
def test_a_killed_front_leaves_no_engine_behind(phase: str) -> None:
    command = (sys.executable, "-m", "tests.support.gated_server", phase)
    with ServerProcess(
        phase, "--max-batch-size", str(BATCH), *called_from_python(phase), command=command
    ) as server:
        engine = engine_of(server.process.pid)
        hold_a_full_batch(server)
        server.process.kill()
        eventually(lambda: has_ended(engine))


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_engine_is_built(phase: str, number: signal.Signals) -> None:
    """A container's first process must handle SIGTERM: the kernel drops a signal that it does not handle."""
    command = [sys.executable, "-m", phase, "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        engine = engine_of(process.pid)
        os.killpg(process.pid, number)
        assert process.wait(HANG_S) == 128 + number
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
def test_an_engine_that_cannot_be_built_is_one_line(
    make_engine: Callable[[], Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "SPAWN", FORKS)  # starts sooner
    with pytest.raises(StartupError, match=says):
        EngineProcess(make_engine, functools.partial(os.nice, 0)).build()


# ---------------------------------------------------------------------- threads

PREFILL = "Once upon a time there was a brave fox. " * 60  # long enough for every product to be shared out


def threads_of_a_server(phase: str, workers: int, *flags: str) -> int:
    """Serve requests of several kinds with `workers` OpenMP threads. Returns the number of threads of the engine's
    process."""
    env = {"OMP_NUM_THREADS": str(workers), "OPENBLAS_NUM_THREADS": "1"}  # numpy has threads of its own
    with ServerProcess(phase, *flags, env=env, command=(sys.executable, "-m", phase)) as server:
        server.complete(prompt=PREFILL, max_tokens=12, temperature=1, top_p=0.9, seed=4)
        server.complete(prompt=[PREFILL] * 4, logprobs=3, presence_penalty=1, stop=["fox"])
        server.events(prompt=PREFILL)
        assert server.client.get("/telemetry").status_code == 200
        return engine_of(server.process.pid).num_threads()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("served", "flag"), [("phase7_chunked", None), ("phase9_pipelined", "--pass-threads")]
)
def test_one_pool_of_workers_of_each_kind(served: str, flag: str | None) -> None:
    """A second thread that computes would start a second pool of libgomp's workers. The native kernels' threads are
    one pool, whoever computes."""
    two, one = (threads_of_a_server(served, n, *([flag, str(n)] if flag else [])) for n in (2, 1))
    assert two - one == 2


def test_a_thread_that_hangs_does_not_keep_the_server() -> None:
    """A thread that works for a request cannot be interrupted. The process ends without waiting for it."""
    options = ("--shutdown-timeout", "0.2")
    with ServerProcess("phase5_continuous", *options, module="tests.support.gated_server") as server:
        server.order("stick")
        (stuck,) = in_background(1, lambda _: server.client.post("/tokenize", json={"prompt": "a hat"}))
        server.expect("hangs")
        server.signal()
        assert server.wait() == 0
        assert isinstance(stuck.exception(HANG_S), httpx.TransportError)
        assert "Traceback" not in server.log_text
