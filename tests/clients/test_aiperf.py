"""`aiperf`, NVIDIA's load generator."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.support import AIPERF, MAX_TOKENS, ON_TWO_PHASES, part

TOOL = AIPERF
SCRIPT = "aiperf_run.py"
pytestmark = [pytest.mark.clients, ON_TWO_PHASES]


def test_chat(report: dict[str, Any]) -> None:
    """`aiperf profile` by streamed chat: every request, and the tokens it counted."""
    said = part(report, "chat")
    assert said["tokens"] == [MAX_TOKENS] * said["sent"]
