"""`/metrics`, checked by Prometheus' own tool, if it is installed (Debian's package `prometheus` has it)."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from tests.clients.support import Program, on_phases
from tests.support.servers import ServerProcess

PROMTOOL = shutil.which("promtool")
TOOL = Program("promtool", ["promtool", "--version"])
pytestmark = [
    pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool on this machine"),
    on_phases(4, 10),
]

#: The only complaint about vLLM's names, and about ours, which follow them.
COLON = re.compile(r"\S+ metric names should not contain ':'")


def check(page: str) -> tuple[int, list[str]]:
    """Return promtool's exit code (0: clean, 3: bad style, 1: cannot be parsed) and the lines of its output."""
    command = [str(PROMTOOL), "check", "metrics"]
    ran = subprocess.run(command, input=page, capture_output=True, text=True, timeout=60, check=False)
    return ran.returncode, (ran.stdout + ran.stderr).split("\n")


def test_the_page_of_a_server(server: ServerProcess) -> None:
    """`promtool check metrics`: it finds fault with the colons of names, and with nothing else."""
    server.complete()
    server.events()
    page = server.client.get("/metrics").text
    code, said = check(page)
    complaints = list(filter(None, said))
    assert code == 3, complaints
    assert all(COLON.fullmatch(line) for line in complaints), complaints
    assert check(re.sub(r"\b(vllm|infer):", r"\1_", page)) == (0, [""])
