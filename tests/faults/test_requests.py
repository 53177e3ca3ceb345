"""Faults of one request and of its client: neighbours are not affected, and the next request is served.

| fault | test |
| --- | --- |
| a pass raises | `test_a_pass_that_raises` |
| out of memory in a pass | `test_a_pass_that_raises` |
| NaN in one row | `test_a_row_without_numbers` |
| sampler raises | `test_a_part_that_raises` |
| detokenizer raises | `test_a_part_that_raises` |
| grammar raises | `test_a_part_that_raises` |
| tokenizer raises | `test_a_tokenizer_that_raises` |
| client gone: waiting | `test_a_client_leaves_while_it_waits` |
| client gone: prefilling, decoding, between chunks; streaming or not | `test_a_client_leaves_while_it_is_served` |
| slow reader | `test_a_slow_reader` |
| cancel storm | `test_a_storm_of_cancellations` |

The other faults are tested in `tests/server`, whose tests check the next request, too:

| fault | test |
| --- | --- |
| half body; an id that is 1 MB long | `test_limits.py`: `test_a_request_that_does_not_come_whole_or_is_none` |
| body too large | `test_refusals.py`: `test_a_body_over_the_limit` |
| queue full | `test_traffic.py`: `test_sixteen_at_once_all_complete_and_one_more_is_refused` |
| pool full with preemption | `test_traffic.py`: `test_everyone_completes_where_blocks_run_out` |
| duplicate request ids | `test_access.py`: `test_requests_of_one_id_do_not_meet` |

The faults of the process are in `test_processes.py`.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch

from common.request import Request
from tests.faults import breaking
from tests.faults.breaking import MARKED, SALT
from tests.faults.conftest import BATCH
from tests.server.support import (
    HANG_S,
    LEAVE,
    LocalServer,
    assert_error,
    eventually,
    in_background,
    post,
    with_option,
)

pytestmark = pytest.mark.usefixtures("neighbours")


def ending(server: LocalServer, **fields: Any) -> tuple[int, str]:
    """Return the number of tokens of a stream, and the code of its last event, which must be an error."""
    *tokens, (name, data) = server.events(**fields)
    assert {each for each, _ in tokens} <= {"token"}
    assert name == "error"
    return len(tokens), data["error"]["code"]


# ---------------------------------------------------------------------- in the engine


@pytest.mark.parametrize("error", [RuntimeError("told to"), torch.OutOfMemoryError("no room")], ids=repr)
def test_a_pass_that_raises(server: LocalServer, phase: str, error: Exception) -> None:
    with breaking.passes(server, before=breaking.raising(error)):
        count, code = ending(server, **MARKED)
        assert code == "internal_error"
        # The third pass fails. Each pass before it yields one token, or several where drafts came true.
        assert 2 <= count < 40 if phase in with_option("draft_length") else count == 2
        assert_error(server.post(**MARKED), 500, None, "internal_error")
    assert server.complete(**MARKED)["usage"]["completion_tokens"] == 40


def test_a_row_without_numbers(server: LocalServer) -> None:
    with breaking.passes(server, after=breaking.no_number):
        assert ending(server, **MARKED) == (0, "nan_logits")
        assert_error(server.post(**MARKED), 500, None, "nan_logits")
    assert server.complete(**MARKED)["usage"]["completion_tokens"] == 40


def break_sampler(request: Request) -> None:
    request._generator = "none"  # type: ignore[assignment]  # torch does not accept a string


def break_detokenizer(request: Request) -> None:
    assert request.detokenizer is not None
    request.detokenizer.add = breaking.raises  # type: ignore[method-assign]


def break_grammar(request: Request) -> None:
    assert request.matcher is not None
    request.matcher.advance = breaking.raises  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("breaks", [break_sampler, break_detokenizer, break_grammar])
def test_a_part_that_raises(server: LocalServer, breaks: Any) -> None:
    guilty: dict[str, Any] = {"cache_salt": SALT, "max_tokens": 9, "temperature": 1, "seed": 3}
    if breaks is break_grammar:
        guilty["structured_outputs"] = {"regex": "[a-z ]{30}"}
    with breaking.requests(server, breaks):
        assert ending(server, **guilty) == (0, "internal_error")
        assert_error(server.post(**guilty), 500, None, "internal_error")
    assert server.complete(**guilty)["usage"]["completion_tokens"] > 0


def test_a_tokenizer_that_raises(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = server.engine.tokenizer
    encode = tokenizer.encode

    def picky(text: str, **named: Any) -> list[int]:
        return breaking.raises() if "xyzzy" in text else encode(text, **named)

    monkeypatch.setattr(tokenizer, "encode", picky)
    for stream in (True, False):
        assert_error(server.post(prompt="say xyzzy", stream=stream), 500, None, "internal_error")
    # No handler takes the error at this route. Its connection must serve the next request nevertheless.
    address = ("127.0.0.1", server.port)
    with contextlib.closing(http.client.HTTPConnection(*address, timeout=HANG_S)) as connection:
        connection.request("POST", "/tokenize", b'{"prompt": "xyzzy"}', {"Content-Type": "application/json"})
        with connection.getresponse() as answer:
            assert (answer.status, b"internal_error" in answer.read()) == (500, True)
        opened = connection.sock
        connection.request("GET", "/health")
        with connection.getresponse() as answer:
            assert answer.status == 200
        assert connection.sock is opened


# ---------------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("leave", LEAVE, ids=lambda leave: leave.__name__)
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_leaves_while_it_waits(
    server: LocalServer,
    stream: bool,
    leave: Callable[[socket.socket], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = breaking.Gate()
    before = server.counters()
    with breaking.passes(server, before=gate):
        (batch,) = in_background(1, lambda _: post(server, **MARKED | {"n": BATCH, "max_tokens": 2}))
        gate.wait()
        waiting = [server.raw(stream=stream, max_tokens=900, ignore_eos=True) for _ in range(2)]
        eventually(lambda: server.worker.num_waiting() >= len(waiting))
        for connection in waiting:
            leave(connection)
        time.sleep(0.1)  # for the event loop to hear of it, which is not held
        gate.open()
        assert batch.result(HANG_S).status_code == 200
        # A client that left while its request was tokenized is logged. Its request never reached the engine.
        left = before["requests_cancelled"] + len(waiting)
        dropped = "dropped: the client left"
        eventually(lambda: server.counters()["requests_cancelled"] + caplog.text.count(dropped) == left)
    decoded = server.counters()["decode_tokens"] - before["decode_tokens"]
    assert decoded < 900, "what nobody waits for was computed"
    for connection in waiting:
        connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "not streaming"])
@pytest.mark.parametrize("moment", ["prefilling", "between chunks", "decoding"])
def test_a_client_leaves_while_it_is_served(
    server: LocalServer, phase: str, moment: str, stream: bool
) -> None:
    if moment == "between chunks" and phase not in with_option("prefill_chunk_size"):
        pytest.skip("prompts have no chunks yet")
    own = {"cache_salt": f"{moment} {stream}"}  # a prompt that hits the cache would have no chunks
    long_prompt = {"prompt": [breaking.MARK] * 200} | own if moment != "decoding" else {}
    gate = breaking.Gate({"prefilling": 1, "between chunks": 2, "decoding": 5}[moment])
    before = server.counters()
    with breaking.passes(server, before=gate):
        connection = server.raw(**MARKED | long_prompt | {"stream": stream, "max_tokens": 800})
        gate.wait()
        connection.close()
        time.sleep(0.1)  # for the event loop to hear of it, which is not held
        gate.open()
        eventually(lambda: server.counters()["requests_cancelled"] == before["requests_cancelled"] + 1)
    assert server.counters()["requests_failed"] == before["requests_failed"]


@pytest.mark.slow
def test_a_slow_reader(server: LocalServer, caplog: pytest.LogCaptureFixture) -> None:
    """A client that reads nothing is cancelled. A slow one gets its whole answer."""
    (patient,) = in_background(1, lambda _: read_slowly(server))
    with server.raw(stream=True, max_tokens=900, ignore_eos=True, logprobs=5):
        eventually(lambda: "ended: cancelled (the client left)" in caplog.text)
    assert "a client took too little of its answer for 2 s: closed" in caplog.text
    assert patient.result(HANG_S) == server.complete(max_tokens=60, ignore_eos=True)["choices"][0]["text"]


def read_slowly(server: LocalServer) -> str:
    text = ""
    with server.streaming(max_tokens=60, ignore_eos=True) as events:
        for name, data in events:
            text += data["token"] if name == "token" else ""
            time.sleep(0.005)
    return text


@pytest.mark.slow
def test_a_storm_of_cancellations(server: LocalServer) -> None:
    draw = random.Random(5)

    def ask(number: int) -> None:
        body = server.body(prompt=f"Once {number}", max_tokens=300, ignore_eos=True, stream=number % 2 == 0)
        patience = draw.choice([0.001, 0.01, 0.1])
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=patience)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(60)))
