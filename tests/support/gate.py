"""A gate before every forward pass of an engine. Orders open it, close it, or make the passes fail.

The engine has a process of its own. It reads its orders from a FIFO, into which `gated_server` writes them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch

from common.engine.engine import Engine

SECRET = "the-secret-inside-the-server"

ORDERS = ("hold", "open", "fail", "nan", "heal")

gate = threading.Event()
gate.set()
broken = ""


def say(line: str) -> None:
    print(line, flush=True)


def obey(order: str) -> None:
    """Carry out an order, and echo it."""
    global broken
    if order == "hold":
        gate.clear()
    elif order == "open":
        gate.set()
    else:
        broken = "" if order == "heal" else order
    say(order)


def obey_all(orders: Path) -> None:
    with orders.open() as lines:
        for line in lines:
            obey(line.strip())


def before_pass(*_: object) -> None:
    if not gate.is_set():
        say("held")
        gate.wait()
    if broken == "fail":
        raise RuntimeError(SECRET)


def after_pass(_: object, __: object, logits: torch.Tensor) -> torch.Tensor:
    return torch.full_like(logits, torch.nan) if broken == "nan" else logits


def build_engine(make_engine: Callable[[], Engine], orders: Path) -> Engine:
    """Build an engine behind the gate. `orders`: the FIFO."""
    engine = make_engine()
    engine.runner.model.register_forward_pre_hook(before_pass)
    engine.runner.model.register_forward_hook(after_pass)
    threading.Thread(target=obey_all, args=(orders,), daemon=True).start()
    return engine
