"""Settings that must be in place before any test module is imported."""

from __future__ import annotations

import functools
import gc
import os
import random
import signal
import ssl
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import pytest
import torch
from hypothesis import settings

from kernels import native
from kernels.dispatch import HAS_TRITON

if TYPE_CHECKING:
    from common.models.layers import CausalLM

# Triton decides between compiling and interpreting when it is first imported, and transformers imports it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The models of most tests are so small that threads only wait for each other, and test workers share the cores.
torch.set_num_threads(1)

# An example may take long on a busy machine. The profile keeps what Hypothesis sets by default here and in CI.
settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")

# Tests compute with the native kernels, as servers do. With INFER_NATIVE_KERNELS=false they compute with torch, as
# on a machine without a compiler; the servers that tests start read the same variable.
if os.environ.get("INFER_NATIVE_KERNELS", "true").lower() not in ("false", "0"):
    native.load_native_kernels()


# A shell that starts tests in the background makes them ignore SIGINT. Servers would inherit this from the tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# `make test` passes its level and its ARGS to every make below it. The makes that tests run must not see them, and
# pytests that tests run must not see these tests' options.
OURS = ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS", "ARGS", "MODEL", "PHASE", "PYTEST_ADDOPTS")
for variable in OURS:
    os.environ.pop(variable, None)


# ---------------------------------------------------------------------- order


class InAModule(Protocol):
    path: Path


OwnPrompt = Callable[[int], list[int]]
Item = TypeVar("Item", bound=InAModule)


def shuffled(items: Sequence[Item], seed: int) -> list[Item]:
    """Return the tests in the order that `seed` draws: the modules, and the tests of each module."""
    draw = random.Random(seed)
    modules = [list(tests) for _, tests in groupby(items, key=lambda item: item.path)]
    draw.shuffle(modules)
    for tests in modules:
        draw.shuffle(tests)
    return [test for tests in modules for test in tests]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--order-seed", metavar="SEED", type=int, help="run the tests in the random order of this seed"
    )


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.getoption("order_seed")
    return None if seed is None else f"order of the tests: drawn by --order-seed={seed}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle before pytest groups the tests by their servers, so that no server is started twice.

    Plugins such as `pytest-random-order` shuffle after that: then almost every test starts a server.
    """
    seed = config.getoption("order_seed")
    if seed is not None:
        items[:] = shuffled(items, seed)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without garbage collections, and exclude what exists then from later ones.

    A full collection would scan the objects of all test modules and of torch and transformers: 0.5 s each time.
    """
    from common.startup.process_memory import freeze  # after the settings above

    gc.disable()
    try:
        return (yield)
    finally:
        freeze()
        gc.enable()


@pytest.fixture
def own_prompt(request: pytest.FixtureRequest) -> OwnPrompt:
    """Draws a prompt of a number of token ids by the test's name, so that it hits no blocks of other tests."""
    draw = random.Random(request.node.nodeid)
    return lambda tokens: [draw.randrange(50, 750) for _ in range(tokens)]


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Make Triton's interpreter quicker, where it computes."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1":
            from tests.kernels.interpreter import prepare_functions_once  # after the settings above

            prepare_functions_once(monkeypatch)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_tls_context() -> Iterator[None]:
    """Let HTTP clients share a context: each would read the certificates of all authorities, for 20 to 50 ms."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture
def anyio_backend() -> str:
    """Asynchronous tests run in asyncio's event loop."""
    return "asyncio"


@pytest.fixture(scope="session")
def llama() -> CausalLM:
    """A small Llama with random weights under which every token of the prompt matters."""
    from tests.support.engines import tiny_model  # after the settings above

    return tiny_model()


@pytest.fixture
def torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute without native kernels, as on a machine that has none."""
    monkeypatch.setattr(native, "_loaded", False)
