"""Peers by name. Each is a server with the same HTTP route, so the same load generator measures it."""

from __future__ import annotations

import functools
import socket
import sys
from collections.abc import Callable

from benchmarks.peers.environments import LIBRARIES, find_environment
from benchmarks.servers import SEQUENCES_PER_SLOT, Setup, Target
from common.config import resolve_device
from common.errors import StartupError

ORDER = 100.0  # peers stand after all phases


def _options(setup: Setup, **further: str) -> dict[str, str]:
    return {
        "model": setup.model,
        "device": setup.device,
        "dtype": setup.dtype,
        "max-seq-len": str(setup.max_seq_len),
    } | {name.replace("_", "-"): value for name, value in further.items()}


def _generate(setup: Setup, _argument: str) -> list[Target]:
    return [Target("generate()", ORDER, "benchmarks.peers.generate", _options(setup))]


def _transformers(setup: Setup, mode: str) -> list[Target]:
    """Return the targets of `transformers`, one a mode; only one if a mode is named."""
    batch = str(setup.slots)
    modes = {
        "single": ("transformers, one by one", {"mode": "batch", "max_batch_size": "1"}),
        "batch": (f"transformers, batches of {batch}", {"mode": "batch", "max_batch_size": batch}),
        "continuous": (
            "transformers, continuous",
            {"mode": "continuous", "max_batch_size": batch, "kv_tokens": str(setup.kv_tokens)},
        ),
    }
    if mode and mode not in modes:
        raise StartupError(f"--peer transformers={mode}: there are {', '.join(modes)}")
    return [
        Target(
            label, ORDER + 1 + place / 10, "benchmarks.peers.transformers_peer", _options(setup, **further)
        )
        for place, (name, (label, further)) in enumerate(modes.items())
        if mode in ("", name)
    ]


def _vllm(setup: Setup, folder: str) -> list[Target]:
    """Return the target of vLLM's own server, its options equivalent to those of the phases."""
    label = _check("vllm", setup, folder)
    options = {
        "model": setup.model,
        "dtype": setup.dtype,
        "kv-tokens": str(setup.kv_tokens),
        "max-model-len": str(setup.max_seq_len),
        "max-num-seqs": str(setup.slots * SEQUENCES_PER_SLOT),
        "enable-prefix-caching": "",  # its default, said where options are shown
        "host": "127.0.0.1",
        "port": str(_free_port()),
    }
    # The folder is no option: results keep options, and nobody's folders.
    program = (sys.executable, "-m", "benchmarks.peers.vllm_server", folder)
    # A chat's next turn goes on from the answer's token ids.
    fields = {"return_token_ids": True}
    return [Target(label, ORDER + 2, None, options, program=program, request_fields=fields)]


def _library(peer: str, order: float, setup: Setup, folder: str) -> list[Target]:
    """Return the target of a library behind our front, with the KV memory of the paged phases."""
    label = _check(peer, setup, folder)
    memory = {
        "max_batch_size": str(setup.slots * SEQUENCES_PER_SLOT),
        "kv_tokens": str(setup.kv_tokens),
    }
    program = (sys.executable, "-m", "benchmarks.peers.library", peer, folder)
    return [Target(label, order, None, _options(setup, **memory), program=program)]


def _check(peer: str, setup: Setup, folder: str) -> str:
    """Check that a library is installed and can be compared. Returns its label."""
    environment = find_environment(peer, folder)
    if resolve_device(setup.device).type != "cpu":
        raise StartupError(f"--peer {peer} computes on the CPU: compare it with --device cpu")
    return f"{LIBRARIES[peer].title} {environment.version}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


PEERS: dict[str, Callable[[Setup, str], list[Target]]] = {
    "generate": _generate,
    "transformers": _transformers,
    "vllm": _vllm,
    "openvino": functools.partial(_library, "openvino", ORDER + 3),
    "llama.cpp": functools.partial(_library, "llama.cpp", ORDER + 4),
}


def peer_targets(name: str, setup: Setup) -> list[Target]:
    """Return the targets of a peer by its name, or of a server that runs already by its URL.

    Raises:
        StartupError: there is no such peer, or it is not installed.
    """
    if name.startswith(("http://", "https://")):
        return [Target(label=name, order=ORDER + 9, module=None, options={}, url=name)]
    peer, _, argument = name.partition("=")
    if peer not in PEERS:
        raise StartupError(f"--peer {name}: there are {', '.join(PEERS)}, or the URL of a server")
    return PEERS[peer](setup, argument)
