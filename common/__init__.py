"""Code that all phases share: models, requests, sampling, text, KV memory, the engine step, and the server."""

import kernels  # noqa: F401  # limits how long threads spin: must come before torch
