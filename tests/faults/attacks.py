"""Attacks beside ordinary clients, whose answers must stay right. Afterwards the server's state is checked."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import psutil

from common.server import logs
from tests.faults.attackers import Attackers
from tests.faults.ordinary import OrdinaryClients
from tests.faults.raw_http import Target
from tests.support.servers import ServerProcess, asking_for_health

KEY = "a-key-of-the-suite"
ACCESS: dict[str, Any] = {"env": {"INFER_API_KEY": KEY}, "headers": {"Authorization": f"Bearer {KEY}"}}

#: Statuses with which a server may refuse an attack.
REFUSALS = {"400", "401", "408", "413", "422", "429", "503"}
#: Attacks whose connections a server may close: their bytes come too slowly, or are never read.
MAY_BE_CUT = {"one_byte_chunks", "unread_bytes"}
ANSWERS_EACH, ATTACKED_S = 2, 3.0
#: Bytes by which a server may grow from the first attack to the second: the allocator keeps freed memory.
SLACK_BYTES = 128 * 2**20


def target_of(server: ServerProcess) -> Target:
    card = server.client.get("/v1/models").json()["data"][0]
    return Target(server.port, card["id"], KEY, card["max_model_len"])


def memory_bytes(server: ServerProcess) -> int:
    """Return the resident memory in bytes of the server and of the processes that it has started.

    Shared memory is left out: each process that maps Ray's object store would count it again, and the store keeps
    its pages.
    """
    process, total = psutil.Process(server.process.pid), 0
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            held = each.memory_info()
            total += held.rss - getattr(held, "shared", 0)
    return total


def assert_ordinary_clients_are_served(
    server: ServerProcess, names: Sequence[str], *, pulse_s: float = logs.PULSE_EVERY_S
) -> None:
    """Attack a server twice, each time until every ordinary client has its right answers.

    During the attacks `/health` must be 200, and every attack must be answered or refused. Afterwards the server
    must be idle, serve the next request, and be no larger than after the first time. It returns freed memory to
    the system every `pulse_s` seconds.
    """
    target = target_of(server)
    clients = OrdinaryClients(target)
    asyncio.run(clients.learn())
    most = 0  # bytes that the server may hold after an attack; the first attack sets the measure
    for _ in range(2):
        attackers = Attackers(target, names)
        try:
            with asking_for_health(server.url) as health:
                service = asyncio.run(clients.ask_until_each_has(ANSWERS_EACH, at_least_s=ATTACKED_S))
        finally:
            outcomes = attackers.stop()
        assert service.mistakes == []
        assert {each.status_code for each in health} == {200}
        for name, counted in outcomes.items():
            cut = {"closed"} if name in MAY_BE_CUT else set()
            assert set(counted) <= REFUSALS | {"200", "left"} | cut, (name, counted)
        server.begin_test()  # waits until all requests have ended
        returned_by = time.monotonic() + pulse_s + 1
        while (held := memory_bytes(server)) > most and time.monotonic() < returned_by:
            time.sleep(0.5)
        assert most == 0 or held <= most, f"{held} bytes after the second attack, {most} at most"
        most = held + SLACK_BYTES
    assert server.complete(max_tokens=3)["usage"]["completion_tokens"] == 3
    assert server.process.poll() is None
