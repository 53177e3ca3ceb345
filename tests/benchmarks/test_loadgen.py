"""The load generator compared with a server that records when it sent each token."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from typing import NamedTuple

import pytest

from benchmarks.client import Endpoint
from benchmarks.loadgen import LoadGeneratorError, LoadPlan, LoadResult, generate_load, run_load
from benchmarks.workloads import PlannedRequest
from tests.benchmarks.conftest import plan, planned
from tests.benchmarks.fake_server import FakeServer, Script


def load(request_plan: LoadPlan) -> LoadResult:
    """Run a plan in this process, which starts faster. For tests that compare no exact times."""
    return asyncio.run(generate_load(request_plan))


# ---------------------------------------------------------------------------------------------- times


class Comparison(NamedTuple):
    """Medians of the differences between the client's times and the server's, in seconds."""

    gap: float
    way_there: float
    way_back: float


def compare_clocks(script: Script) -> Comparison:
    """Compare the client's times of a run with the server's. Both processes read the same monotonic clock."""
    with FakeServer(script) as server:
        result = run_load(plan(server.url, [planned(i, 0.03 * i, tokens=20) for i in range(8)]))
        app = server.app
    ways_there, ways_back, gap_errors = [], [], []
    for record in result.requests:
        assert record.error is None
        sent = app.sent[record.index]
        assert len(record.token_times_s) == len(sent) == record.completion_tokens == 20
        arrived = [result.origin_s + time for time in record.token_times_s]
        assert all(there >= here - 0.0005 for here, there in zip(sent, arrived, strict=True))
        assert record.sent_s is not None
        ways_there.append(app.received[record.index] - (result.origin_s + record.sent_s))
        ways_back.append(arrived[0] - sent[0])
        scripted = [later - earlier for earlier, later in itertools.pairwise(sent)]
        gap_errors += [abs(gap - asked) for gap, asked in zip(record.gaps_s, scripted, strict=True)]
        assert record.ttft_s >= script.first_s
    return Comparison(*map(statistics.median, (gap_errors, ways_there, ways_back)))


@pytest.mark.parametrize("style", ["named", "plain"])
@pytest.mark.slow
def test_times_are_those_of_the_server(style: str) -> None:
    """The client's times are within 2 ms of those at which the server wrote the tokens.

    One good run of twenty is enough: a busy machine spoils many runs, but an error of the client spoils all.
    """
    seen = []
    for _ in range(20):
        found = compare_clocks(Script(first_s=0.05, gap_s=0.01, style=style))
        # TTFT = the way there (connection and request) + the script's delay + the way back.
        if found.gap < 0.002 and 0 <= found.way_there < 0.05 and 0 <= found.way_back < 0.002:
            return
        seen.append(found)
    pytest.fail(f"never as the server: {seen}")


def test_requests_leave_on_time() -> None:
    """One good run of twenty is enough, as above."""
    times = [0.05 * i for i in range(10)]
    seen = []
    for _ in range(20):
        with FakeServer() as server:
            result = load(plan(server.url, [planned(i, time, tokens=2) for i, time in enumerate(times)]))
            lags = [server.app.received[i] - result.origin_s - time for i, time in enumerate(times)]
        assert min(lags) >= 0
        assert [record.scheduled_s for record in result.requests] == pytest.approx(times)
        assert result.generator.max_lag_s >= 0
        seen.append(statistics.median(lags))
        if seen[-1] < 0.02:
            return
    pytest.fail(f"never on time: {seen}")


def test_a_burst_is_all_in_flight_at_once() -> None:
    with FakeServer(Script(first_s=2.0)) as server:
        load(plan(server.url, [planned(i, tokens=3) for i in range(24)]))
        assert server.app.most_running == 24


def test_sequential_waits_for_each_answer() -> None:
    with FakeServer() as server:
        result = load(plan(server.url, [planned(i, tokens=4) for i in range(5)], sequential=True))
        assert server.app.most_running == 1
    for earlier, later in itertools.pairwise(result.requests):
        assert earlier.finished_s is not None
        assert later.sent_s is not None
        assert later.sent_s >= earlier.finished_s


def chat(first: int, turns: int, *, text: bool = False) -> list[PlannedRequest]:
    """Return a conversation. Its requests are numbered from `first` on, and its prompts begin with `first`."""
    return [
        PlannedRequest(
            first + turn,
            0.0,
            f"said {turn} " if text else [first, turn],
            2,
            3,
            follows=first + turn - 1 if turn else None,
        )
        for turn in range(turns)
    ]


@pytest.mark.parametrize("style", ["named", "plain"])
def test_a_turn_goes_on_from_the_answer_before(style: str) -> None:
    """The fake server's answers have the ids 0, 1, 2, …"""
    with FakeServer(Script(style=style)) as server:
        result = load(plan(server.url, [*chat(0, 3), *chat(3, 2)], sequential=False))
        prompts = [body["prompt"] for body in server.app.bodies]
        assert server.app.most_running == 2
    told = [0, 1, 2]
    assert [p for p in prompts if p[0] == 0] == [
        [0, 0],
        [0, 0, *told, 0, 1],
        [0, 0, *told, 0, 1, *told, 0, 2],
    ]
    assert [p for p in prompts if p[0] == 3] == [[3, 0], [3, 0, *told, 3, 1]]
    for earlier, later in ((0, 1), (1, 2), (3, 4)):
        done, sent = result.requests[earlier].finished_s, result.requests[later].sent_s
        assert done is not None
        assert sent is not None
        assert sent >= result.requests[later].scheduled_s >= done
    assert all(record.error is None for record in result.requests)


@pytest.mark.parametrize("style", ["named", "plain"])
def test_text_goes_on_as_text(style: str) -> None:
    with FakeServer(Script(style=style)) as server:
        load(plan(server.url, chat(0, 2, text=True)))
        assert [body["prompt"] for body in server.app.bodies] == ["said 0 ", "said 0  a asaid 1 "]


def test_a_chat_ends_with_a_turn_that_fails() -> None:
    with FakeServer(Script(faults={0: "error"})) as server:
        result = load(plan(server.url, [*chat(0, 3), *chat(3, 2)]))
    errors = [record.error for record in result.requests]
    assert errors == ["out of luck", "never sent", "never sent", None, None]


def test_a_server_that_names_no_ids_cannot_be_asked_again() -> None:
    with FakeServer(Script(style="plain", token_ids=False)) as server:
        result = load(plan(server.url, chat(0, 2)))
        assert len(server.app.bodies) == 1
    assert result.requests[0].error is None
    assert "--text" in str(result.requests[1].error)


def test_warm_up_is_sent_first_and_not_counted() -> None:
    with FakeServer() as server:
        warmup = [planned(100, tokens=3), planned(101, tokens=3)]
        result = load(plan(server.url, [planned(0, tokens=5)], warmup=warmup))
        assert [body["prompt"][0] for body in server.app.bodies] in ([100, 101, 0], [101, 100, 0])
    assert [record.index for record in result.requests] == [0]
    assert result.telemetry_before is not None
    assert result.telemetry_after is not None
    assert result.telemetry_before["counters"]["steps"] == 6  # the warm-up's
    assert result.telemetry_before["steps"] == []
    assert [step["step"] for step in result.telemetry_after["steps"]] == [6, 7, 8, 9, 10]


def test_a_server_without_telemetry_is_fine() -> None:
    with FakeServer(Script(telemetry=False)) as server:
        result = load(plan(server.url, [planned(0, tokens=3)]))
    assert result.telemetry_before is None
    assert result.telemetry_after is None
    assert result.requests[0].error is None


@pytest.mark.slow
def test_the_generator_reports_its_own_processor_time() -> None:
    with FakeServer(Script(gap_s=0.001)) as server:
        result = run_load(plan(server.url, [planned(i, tokens=100) for i in range(4)]))
    assert 0 < result.generator.cpu_s < result.generator.wall_s
    assert result.generator.cpu_share == result.generator.cpu_s / result.generator.wall_s
    assert result.generator.wall_s >= 0.1


# ---------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("fault", "said", "tokens"),
    [
        ("refuse", "HTTP 503: the queue is full", 0),
        ("error", "out of luck", 5),
        ("drop", "RemoteProtocolError", 5),
        ("json", "no event stream", 0),
        ("empty", "the answer has no tokens", 0),
    ],
)
@pytest.mark.parametrize("style", ["named", "plain"])
def test_one_failure_is_one_failure(fault: str, said: str, tokens: int, style: str) -> None:
    with FakeServer(Script(style=style, faults={1: fault})) as server:
        result = load(plan(server.url, [planned(i, tokens=10) for i in range(3)]))
    errors = [record.error for record in result.requests]
    assert errors[0] is None
    assert errors[2] is None
    assert errors[1] is not None
    assert said in errors[1]
    assert len(result.requests[1].token_times_s) == tokens  # tokens before the fault are kept
    assert result.requests[1].finished_s is not None
    assert result.abort is None


def test_a_stream_that_ends_without_saying_so_is_an_error() -> None:
    """The chunked HTTP body is complete, but has neither `done` nor `[DONE]`."""
    with FakeServer() as server:
        server.app.end = lambda usage: b": nothing\n\n"  # type: ignore[method-assign]
        result = load(plan(server.url, [planned(0, tokens=4)]))
    assert result.requests[0].error == "the stream broke off without a word"
    assert len(result.requests[0].token_times_s) == 4


def test_a_stall_ends_the_run() -> None:
    with FakeServer(Script(faults={1: "stall"})) as server:
        result = load(plan(server.url, [planned(0, tokens=5), planned(1, tokens=10)], stall_timeout_s=0.5))
    assert result.abort == "stalled: no token on any stream for 0.5 s"
    assert result.requests[0].error is None
    assert result.requests[1].error == result.abort
    assert len(result.requests[1].token_times_s) == 5


def test_a_queue_is_no_stall() -> None:
    """One request waits longer than the limit, while others get tokens."""
    with FakeServer(Script(limit=1, gap_s=0.02)) as server:
        result = load(plan(server.url, [planned(i, tokens=20) for i in range(3)], stall_timeout_s=0.5))
    assert result.abort is None
    assert max(record.ttft_s for record in result.requests) > 0.5


def test_a_run_that_takes_too_long_is_ended() -> None:
    with FakeServer(Script(gap_s=0.05)) as server:
        result = load(plan(server.url, [planned(0, tokens=1000), planned(1, 60.0)], run_timeout_s=0.4))
    assert result.abort == "not done after 0.4 s"
    assert [record.error for record in result.requests] == [result.abort, "never sent"]
    assert result.requests[1].sent_s is None


def test_a_generator_that_fails_says_so() -> None:
    broken = LoadPlan(Endpoint("http://127.0.0.1:1", "m"), [planned(0)], stall_timeout_s="soon")  # type: ignore[arg-type]
    with pytest.raises(LoadGeneratorError, match="without a result"):
        run_load(broken)
