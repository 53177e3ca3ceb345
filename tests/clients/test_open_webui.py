"""Open WebUI, a chat page with a server of its own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.support import OPEN_WEBUI, assert_same, chatted, part
from tests.server.support import ServerProcess

TOOL = OPEN_WEBUI
SCRIPT = "open_webui.py"
pytestmark = [pytest.mark.clients, pytest.mark.parametrize("phase", [9], indirect=True, scope="session")]


def test_connection_and_list(report: dict[str, Any], server: ServerProcess) -> None:
    """The connection's check, and the list of models."""
    assert part(report, "connection") == [server.model]
    assert server.model in part(report, "models")


def test_chat_and_title(report: dict[str, Any], server: ServerProcess) -> None:
    """A streamed chat, and the title that it asks for."""
    assert_same(part(report, "chat"), {"text": chatted(server)["text"]})
    assert part(report, "title")
