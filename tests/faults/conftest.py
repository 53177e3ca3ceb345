"""A server of each phase for all faults that it must survive, and neighbours who must not notice."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from common.server.backlogs import Backlogs
from common.server.connections import ConnectionLimits
from tests.faults.neighbours import Neighbours
from tests.server.support import LocalServer, slow_but_on, with_option

QUEUE, BATCH = 6, 4
MAX_SEQ_LEN = 1024


#: With the idea of phase 8 come those of phases 6 and 7: blocks, and prompts in chunks.
SLOW = ("phase4_static", "phase8_prefix", "phase10_speculative")


@pytest.fixture(scope="session", params=slow_but_on("phase5_continuous", "phase9_pipelined", of=SLOW))
def phase(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def options_of(phase: str) -> dict[str, Any]:
    """Of an engine whose passes a test can break, and whose long prompts take several of them where they can."""
    return {
        "max_batch_size": BATCH,
        "max_waiting_requests": QUEUE,
        "max_seq_len": MAX_SEQ_LEN,
        **({"prefill_chunk_size": 64} if phase in with_option("prefill_chunk_size") else {}),
        **({"captured_steps": False} if phase in with_option("captured_steps") else {}),
    }


@pytest.fixture(scope="session")
def shared_server(phase: str) -> Iterator[tuple[LocalServer, Neighbours]]:
    server = LocalServer(
        phase,
        limits=ConnectionLimits(receive_s=0.3),
        backlogs=Backlogs(limit_bytes=2**15),
        body_timeout_s=0.3,
        **options_of(phase),
    )
    yield server, Neighbours(server)
    server.close()


@pytest.fixture
def server(shared_server: tuple[LocalServer, Neighbours], caplog: pytest.LogCaptureFixture) -> LocalServer:
    caplog.set_level(logging.INFO, "common")
    return shared_server[0]


@pytest.fixture
def neighbours(shared_server: tuple[LocalServer, Neighbours], server: LocalServer) -> Iterator[Neighbours]:
    """Streams on their way while a test does its worst. At its end they have what they would have had alone, nobody
    holds a place or memory any more, and the next request is served."""
    _, company = shared_server
    company.begin()
    yield company
    company.end()
