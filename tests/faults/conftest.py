"""A server of each phase for the faults that it must survive, and neighbours that must not be affected."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from common.server.http.connections import ConnectionLimits
from tests.faults.neighbours import Neighbours
from tests.server.support import LocalServer, slow_but_on, with_option

QUEUE, BATCH = 6, 4
MAX_SEQ_LEN = 1024


#: Phase 8 has the features of phases 6 and 7, too: blocks, and prompts in chunks.
SLOW = ("phase4_static", "phase8_prefix", "phase10_speculative")


@pytest.fixture(scope="session", params=slow_but_on("phase5_continuous", "phase9_pipelined", of=SLOW))
def phase(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def options_of(phase: str) -> dict[str, Any]:
    """Return options for passes that a test can break, and for long prompts in chunks if the phase has chunks."""
    return {
        "max_batch_size": BATCH,
        "max_waiting_requests": QUEUE,
        "max_seq_len": MAX_SEQ_LEN,
        **({"prefill_chunk_size": 64} if phase in with_option("prefill_chunk_size") else {}),
        **({"captured_steps": False} if phase in with_option("captured_steps") else {}),
    }


@pytest.fixture(scope="session")
def shared_server(phase: str) -> Iterator[tuple[LocalServer, Neighbours]]:
    server = LocalServer(phase, limits=ConnectionLimits(send_s=2.0), **options_of(phase))
    yield server, Neighbours(server)
    server.close()


@pytest.fixture
def server(shared_server: tuple[LocalServer, Neighbours], caplog: pytest.LogCaptureFixture) -> LocalServer:
    caplog.set_level(logging.INFO, "common")
    return shared_server[0]


@pytest.fixture
def neighbours(shared_server: tuple[LocalServer, Neighbours], server: LocalServer) -> Iterator[Neighbours]:
    """Streams that run during the test. At its end they must have the text that they get alone, no request may hold
    a place or memory, and the next request must be served."""
    _, company = shared_server
    company.begin()
    yield company
    company.end()
