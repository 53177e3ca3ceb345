"""Settings that must be in place before any test module is imported."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from kernels import native

# Triton decides between compiling and interpreting when it is first imported, and transformers imports it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The models of most tests are so small that threads only wait for each other, and test workers share the cores.
torch.set_num_threads(1)

# What servers compute with, tests do, too. INFER_NATIVE_KERNELS=false runs them on the torch references, as a
# machine without a compiler would; the servers that tests start read the same variable.
if os.environ.get("INFER_NATIVE_KERNELS", "true").lower() not in ("false", "0"):
    native.load_native_kernels()


# A shell that starts tests in the background lets them ignore Ctrl-C, and so would the servers that they interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what is computed where there are no native kernels."""
    monkeypatch.setattr(native, "_loaded", False)
