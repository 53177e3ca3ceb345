"""A server whose forward passes a test can hold, release and break.

It is the ordinary server (`common.server.run`), with hooks on the model (`tests.support.gate`). It reads orders
from stdin and echoes each one once it is in force. `hold` and `open` control the gate before every pass. `fail` and
`nan` break every pass until `heal`. `stick` makes the tokenizer hang. The server prints `held` when a pass waits,
and `hangs` when the tokenizer hangs.
"""

from __future__ import annotations

import functools
import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common.engine.engine import Engine
from common.hosting.messages import Built
from common.hosting.process import EngineProcess
from common.server import logs
from common.server import run as serve
from common.server.http import sockets
from common.text.tokenizer import Tokenizer
from tests.support import gate
from tests.support.gate import say

stuck = threading.Event()


class GatedProcess(EngineProcess):
    """An engine's process whose engine is behind the gate."""

    def __init__(self, make_engine: Callable[[], Engine], prepare: Callable[[], None]) -> None:
        self._orders = Path(tempfile.mkdtemp(prefix="gate-")) / "orders"
        os.mkfifo(self._orders)
        super().__init__(functools.partial(gate.build_engine, make_engine, self._orders), prepare)

    def build(self) -> Built:
        built = super().build()
        threading.Thread(target=self._obey, daemon=True).start()
        return built

    def _obey(self) -> None:
        """Obey the orders on stdin. Those for the engine go to its FIFO."""
        engine = self._orders.open("w", buffering=1)
        shutil.rmtree(self._orders.parent)  # its other end is open, too
        for line in sys.stdin:
            order = line.strip()
            if order in gate.ORDERS:
                if order == "heal":
                    stuck.clear()
                engine.write(line)
                continue
            if order == "stick":
                stuck.set()
            say(order)


def main(phase: str, flags: Sequence[str]) -> None:
    encode, bind = Tokenizer.encode, sockets.bind

    def encode_or_hang(*arguments: Any, **flags: Any) -> list[int]:
        if stuck.is_set():
            say("hangs")
            threading.Event().wait()
        return encode(*arguments, **flags)

    def bind_with_small_buffers(host: str, port: int) -> socket.socket:
        """Bind with small buffers, so that a few hundred tokens fill them if a client reads nothing."""
        listener = bind(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        return listener

    Tokenizer.encode = encode_or_hang  # type: ignore[method-assign]
    sockets.bind = bind_with_small_buffers
    logs.PULSE_EVERY_S = 1e6  # tests read every line of the log
    serve.main(phase, flags, process=GatedProcess)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
