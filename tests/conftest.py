"""Settings that must be in place before any test module is imported."""

from __future__ import annotations

import os

import torch

# Triton decides between compiling and interpreting when it is first imported, and transformers imports it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The models of most tests are so small that threads only wait for each other, and test workers share the cores.
torch.set_num_threads(1)
