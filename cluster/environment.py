"""Environment variables for Ray. Ray reads them when it is imported, so this module does not import it."""

from __future__ import annotations

import os

from common.errors import StartupError

#: The first two make Serve pass messages quickly: over gRPC from process to process instead of through Ray's object
#: layer, and without separate threads for our code and for routers. Serve reads them when it is imported, so they
#: must be in the environment of every process of the cluster.
#: Without the third, `RAY_SERVE_THROUGHPUT_OPTIMIZED` opens ports for clients beside the front's: those of Serve's
#: proxy, and one of the front's process.
#: The last replaces Ray's niceness of 15 for workers, so that threads with less priority than the engine (masks,
#: grammars, large bodies) can have less.
FAST = {
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
    "RAY_worker_niceness": "0",
}


def settings() -> dict[str, str]:
    """Return the variables of `FAST`; values that the environment has already take precedence."""
    return {name: os.environ.get(name, value) for name, value in FAST.items()}


def prepare() -> None:
    """Set those environment variables of Ray that are not set yet, for this process and the processes that it
    starts: those of `settings`, and one that turns Ray's usage statistics off.

    Raises:
        StartupError: `RAY_AUTH_MODE=disabled` would let anybody who reaches Ray's ports run code on this machine.
    """
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled":
        raise StartupError(
            "RAY_AUTH_MODE=disabled lets everybody who reaches Ray's ports run code on this machine: unset it, "
            "or set it to token"
        )
    for name, value in {**settings(), "RAY_USAGE_STATS_ENABLED": "0"}.items():
        os.environ.setdefault(name, value)
