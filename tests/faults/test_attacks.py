"""Attacks on a server, each alone and all together, beside twenty ordinary clients.

| attack | in `attackers.py` |
| --- | --- |
| a body in chunks of one byte, with and without a key | `one_byte_chunks` |
| grammars that take seconds to compile | `slow_grammar` |
| a small grammar whose every mask is slow | `slow_mask` |
| two megabytes for `/tokenize`, whose clients leave | `tokenize` |
| the scores of a longest prompt, sixteen times | `prompt_logprobs` |
| streams that nobody reads | `unread_bytes` |
| the metrics, again and again, without a key | `metrics` |
| conversations that are slow to render: many messages, calls, items, a long text | `rendering` |
| a schema with integers of 4,300 digits | `schema_of_long_numbers` |
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults import returning_server
from tests.faults.attackers import ATTACKS
from tests.faults.attacks import ACCESS, assert_ordinary_clients_are_served
from tests.faults.returning_server import PULSE_EVERY_S
from tests.support.servers import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def attacked() -> Iterator[ServerProcess]:
    with ServerProcess("phase9_pipelined", module=returning_server.__name__, **ACCESS) as server:
        yield server
        assert "Traceback" not in server.log_text


@pytest.mark.parametrize("name", ATTACKS)
def test_ordinary_clients_are_served_beside_an_attack(attacked: ServerProcess, name: str) -> None:
    assert_ordinary_clients_are_served(attacked, [name], pulse_s=PULSE_EVERY_S)


def test_ordinary_clients_are_served_beside_all_attacks(attacked: ServerProcess) -> None:
    assert_ordinary_clients_are_served(attacked, list(ATTACKS), pulse_s=PULSE_EVERY_S)
