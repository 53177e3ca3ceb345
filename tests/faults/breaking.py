"""Ways to break one request among healthy ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from common.models.layers import TokenBatch
from common.request import Request
from tests.server.support import HANG_S, LocalServer

MARK = 777  # a token that no neighbour has
SALT = "guilty"  # marks the request that is broken

#: A request that has the mark in every pass: in its prompt, and as each token that it samples.
MARKED: dict[str, Any] = {
    "prompt": [MARK] * 4,
    "logit_bias": {str(MARK): 100},
    "max_tokens": 40,
    "ignore_eos": True,
    "cache_salt": SALT,
}


@contextmanager
def passes(
    server: LocalServer,
    *,
    before: Callable[[int], None] = lambda count: None,
    after: Callable[[Tensor, Tensor], Tensor] = lambda rows, logits: logits,
) -> Iterator[None]:
    """Hook into all passes that have the mark.

    Args:
        server: the server whose passes are hooked.
        before: called before each such pass, with their number so far. It may raise or wait.
        after: gets a mask of the rows that follow a mark, [S], and the logits, [S, vocab]. Returns the new logits.
    """
    count = 0

    def first(_: object, arguments: tuple[TokenBatch, Any]) -> None:
        nonlocal count
        if bool((arguments[0].token_ids == MARK).any()):
            count += 1
            before(count)

    def then(_: object, arguments: tuple[TokenBatch, Any], logits: Tensor) -> Tensor:
        batch = arguments[0]
        return after(batch.token_ids[batch.logit_rows] == MARK, logits)

    model = server.engine.runner.model
    hooks = model.register_forward_pre_hook(first), model.register_forward_hook(then)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Gate:
    """Holds the marked passes, from number `number` on, until it is opened."""

    def __init__(self, number: int = 1) -> None:
        self._number = number
        self.reached, self._open = threading.Event(), threading.Event()

    def __call__(self, count: int) -> None:
        if count >= self._number:
            self.reached.set()
            assert self._open.wait(HANG_S)

    def wait(self) -> None:
        assert self.reached.wait(HANG_S)

    def open(self) -> None:
        self._open.set()


def raising(error: BaseException, number: int = 3) -> Callable[[int], None]:
    """Return a hook that raises in every marked pass from number `number` on, so in the middle of an answer."""

    def before(count: int) -> None:
        if count >= number:
            raise error

    return before


def no_number(rows: Tensor, logits: Tensor) -> Tensor:
    return torch.where(rows.unsqueeze(1), torch.nan, logits)


def raises(*_: object, **__: object) -> Any:
    raise RuntimeError("told to fail")


@contextmanager
def requests(server: LocalServer, breaks: Callable[[Request], None]) -> Iterator[None]:
    """Call `breaks` with every new request that has the salt."""
    engine = server.engine
    make = engine.create_request

    def make_broken(*arguments: Any, **named: Any) -> Request:
        request = make(*arguments, **named)
        if request.cache_salt == SALT:
            breaks(request)
        return request

    engine.create_request = make_broken  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine.create_request = make  # type: ignore[method-assign]
