"""A server whose forward passes a test can hold, release and break: `python -m tests.server.gated_server PHASE …`.

It is the ordinary server (`common.server.serve`), with hooks on the model. Lines on stdin are orders: `hold`
and `open` the gate before every pass; `fail` and `nan` break every pass until `heal`, and `stick` makes the
tokenizer hang. On stdout it says `held` when a pass waits, `hangs` when the tokenizer does, and echoes each order
once it is in force; then, to `collect`, whether the garbage collector has `few` objects to look through or `many`.
"""

from __future__ import annotations

import gc
import socket
import sys
import threading
from types import SimpleNamespace
from typing import Any

import torch

from common.phases import find_phase
from common.server import logs, serve, sockets
from common.server.logs import configure_logging
from common.server.options import read_options

SECRET = "the-secret-inside-the-server"

gate = threading.Event()
gate.set()
broken = ""


def say(line: str) -> None:
    print(line, flush=True)


def obey() -> None:
    global broken
    for line in sys.stdin:
        order = line.strip()
        if order == "hold":
            gate.clear()
        elif order == "open":
            gate.set()
        elif order != "collect":
            broken = "" if order == "heal" else order
        say(order)
        if order == "collect":
            say("few" if len(gc.get_objects()) < gc.get_freeze_count() / 10 else "many")


def before_pass(*_: object) -> None:
    if not gate.is_set():
        say("held")
        gate.wait()
    if broken == "fail":
        raise RuntimeError(SECRET)


def after_pass(_: object, __: object, logits: torch.Tensor) -> torch.Tensor:
    return torch.full_like(logits, torch.nan) if broken == "nan" else logits


def main() -> None:
    package = find_phase(sys.argv[1])

    def build_engine(config: Any) -> Any:
        engine = package.build_engine(config)
        engine.runner.model.register_forward_pre_hook(before_pass)
        engine.runner.model.register_forward_hook(after_pass)
        encode = engine.tokenizer.encode

        def encode_or_hang(*arguments: Any, **options: Any) -> list[int]:
            if broken == "stick":
                say("hangs")
                threading.Event().wait()
            return encode(*arguments, **options)

        engine.tokenizer.encode = encode_or_hang
        return engine

    bind = sockets.bind

    def bind_with_small_buffers(host: str, port: int) -> socket.socket:
        """So that a few hundred tokens suffice to fill what the kernel takes for a client that reads nothing."""
        listener = bind(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        return listener

    sockets.bind = bind_with_small_buffers
    logs.PULSE_EVERY_S = 1e6  # tests read every line of the log
    threading.Thread(target=obey, daemon=True).start()
    gated = SimpleNamespace(PHASE=package.PHASE, Config=package.Config, build_engine=build_engine)
    options, config = read_options(gated, sys.argv[2:])
    configure_logging(options.log_level, options.log_format)
    sys.exit(serve.serve(gated, options, config))


if __name__ == "__main__":
    main()
