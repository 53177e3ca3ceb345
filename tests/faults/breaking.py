"""Ways to break one request, among others that are well."""

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
SALT = "guilty"  # by which the engine's own request is known

#: A request whose every pass has the mark among its tokens: in its prompt, and then as each token it samples.
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
    """Take part in all passes that have the mark.

    Args:
        server: whose.
        before: called with how many of them there were; may raise or wait.
        after: makes other logits of those there are [S, vocab], told which of the rows [S] follow a mark.
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
    """Holds the marked passes, from one of them on, until it is opened."""

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
    """A pass that fails, from the third on: in the middle of an answer."""

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
    """Break those that have the salt, when the engine makes them."""
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
