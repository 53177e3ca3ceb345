"""A server whose forward passes a test can hold, release and break: `python -m tests.support.gated_server PHASE …`.

It is the ordinary server (`common.server.run`), with hooks on the model (`tests.support.gate`). It reads orders
from stdin and echoes each one once it is in force. `hold` and `open` control the gate before every pass. `fail` and
`nan` break every pass until `heal`. `stick` makes the tokenizer hang. The server prints `held` when a pass waits,
and `hangs` when the tokenizer hangs. After `collect` it prints `few` or `many`: the objects that the garbage
collector examines.
"""

from __future__ import annotations

import functools
import gc
import os
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from common.server import logs
from common.server import run as serve
from common.server.http import sockets
from common.server.logs import configure_logging
from common.server.options import read_options
from common.startup.phases import find_phase
from common.text.tokenizer import Tokenizer
from tests.support import gate
from tests.support.gate import say

stuck = threading.Event()


def obey(orders: Path) -> None:
    """Obey the orders on stdin. Those for the engine go to the FIFO `orders`."""
    engine = orders.open("w", buffering=1)
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
        if order == "collect":
            say("few" if len(gc.get_objects()) < gc.get_freeze_count() / 10 else "many")


def main() -> None:
    package = find_phase(sys.argv[1])
    options, config = read_options(package, sys.argv[2:])
    encode = Tokenizer.encode

    def encode_or_hang(*arguments: Any, **flags: Any) -> list[int]:
        if stuck.is_set():
            say("hangs")
            threading.Event().wait()
        return encode(*arguments, **flags)

    Tokenizer.encode = encode_or_hang  # type: ignore[method-assign]

    bind = sockets.bind

    def bind_with_small_buffers(host: str, port: int) -> socket.socket:
        """Bind with small buffers, so that a few hundred tokens fill them if a client reads nothing."""
        listener = bind(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        return listener

    sockets.bind = bind_with_small_buffers
    logs.PULSE_EVERY_S = 1e6  # tests read every line of the log
    orders = Path(tempfile.mkdtemp(prefix="gate-")) / "orders"
    os.mkfifo(orders)
    threading.Thread(target=obey, args=(orders,), daemon=True).start()
    configure_logging(options.log_level, options.log_format)
    serve.serve(functools.partial(gate.build_engine, package.PHASE.slug, orders, config), options)
    serve.exit_at_once(0)


if __name__ == "__main__":
    main()
