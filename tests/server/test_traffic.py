"""Many requests at once, in every phase over HTTP: which requests wait, and what happens when memory runs out.

The server computes four sequences together and lets sixteen wait. In phases with blocks, the pool has too few
blocks for four long sequences.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.support import (
    HANG_S,
    PHASES,
    ServerProcess,
    assert_error,
    called_from_python,
    eventually,
    hold_a_full_batch,
    in_background,
    post,
    slow_but_on,
    with_option,
)

pytestmark = pytest.mark.parametrize(
    "phase",
    slow_but_on("phase4_static", "phase6_paged", "phase9_pipelined", of=PHASES),
    indirect=True,
    scope="session",
)

QUEUE = 16
PAGED = with_option("block_size")
LONG = {"max_tokens": 100, "ignore_eos": True}  # seven blocks of 16 tokens


@pytest.fixture(scope="module")
def shared_busy(phase: str) -> Iterator[ServerProcess]:
    process = ServerProcess(
        phase,
        *("--max-batch-size", "4", "--max-waiting-requests", str(QUEUE), "--max-seq-len", "256"),
        *(("--block-size", "16", "--num-blocks", "16") if phase in PAGED else ()),
        *called_from_python(phase),
        module="tests.server.gated_server",
    )
    yield process
    assert process.process.poll() is None, f"the server did not outlive its tests:\n{process.log_text}"
    process.close()


@pytest.fixture
def busy(shared_busy: ServerProcess) -> Iterator[ServerProcess]:
    """A server that is idle, and must serve the next request after the test."""
    shared_busy.begin_test()
    yield shared_busy
    shared_busy.order("open")
    assert shared_busy.complete(max_tokens=1)["usage"]["completion_tokens"] == 1
    assert "Traceback" not in shared_busy.log_text


def text_of(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_a_short_request_overtakes_a_long_one_but_for_static_batches(busy: ServerProcess, phase: str) -> None:
    busy.order("hold")
    busy.forget_output()
    (long,) = in_background(1, lambda _: post(busy, **LONG, user="long"))
    busy.expect("held")
    room = busy.queue_room()
    (short,) = in_background(1, lambda _: post(busy, max_tokens=5, ignore_eos=True, user="short"))
    eventually(lambda: busy.queue_room() < room)
    busy.order("open")
    assert long.result(HANG_S).json()["usage"]["completion_tokens"] == 100
    assert short.result(HANG_S).json()["usage"]["completion_tokens"] == 5
    eventually(lambda: len(re.findall("user '", busy.log_text)) == 2)
    ended = re.findall(r"user '(\w+)', ended: length", busy.log_text)
    assert ended == (["long", "short"] if phase == "phase4_static" else ["short", "long"])


def test_sixteen_at_once_all_complete_and_one_more_is_refused(busy: ServerProcess) -> None:
    orders = [
        {"prompt": f"Once upon a time {number}", "max_tokens": 4 + 3 * number} for number in range(QUEUE)
    ]
    batch = hold_a_full_batch(busy)
    crowd = in_background(QUEUE, lambda number: post(busy, **orders[number]))
    eventually(lambda: busy.queue_room() == 0)
    refused = busy.post()
    assert_error(refused, 503, None, "queue_full")
    assert (
        "holds 16 requests (the server's option --max-waiting-requests)" in refused.json()["error"]["message"]
    )
    busy.order("open")
    texts = [text_of(each.result(HANG_S)) for each in crowd]
    assert batch.result(HANG_S).status_code == 200
    assert texts == [text_of(busy.post(**order)) for order in orders], "the same as each alone"
    counters = busy.counters()
    assert (counters["requests_failed"], counters["requests_cancelled"]) == (0, 0)


def test_everyone_completes_where_blocks_run_out(busy: ServerProcess, phase: str) -> None:
    orders = [{"prompt": f"The fox number {number}", **LONG} for number in range(4)]
    batch = hold_a_full_batch(busy, max_tokens=1)  # short, so that it frees its seats at once
    room = busy.queue_room()
    crowd = in_background(4, lambda number: post(busy, **orders[number]))
    eventually(lambda: busy.queue_room() == room - 4)  # so that they are computed together
    busy.order("open")
    assert batch.result(HANG_S).status_code == 200
    texts = [text_of(each.result(HANG_S)) for each in crowd]
    counters = busy.counters()
    assert (counters["preemptions"] > 0) == (phase in PAGED)
    assert (counters["requests_finished"], counters["requests_failed"]) == (8, 0)
    assert texts == [text_of(busy.post(**order)) for order in orders], "the same as each alone"
    eventually(lambda: busy.client.get("/telemetry").json()["steps"][-1]["kv_reserved_tokens"] == 0)
