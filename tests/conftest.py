"""Settings that must be in place before any test module is imported."""

from __future__ import annotations

import os

import torch

# Triton decides between compiling and interpreting when it is first imported, and transformers imports it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
