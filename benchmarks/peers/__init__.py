"""Other ways to serve the same model, to be put in the same table.

Each peer is a small file of its own: a server with the same HTTP route, so that the same load generator measures it
over the same kind of socket.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.peers.llama_cpp import llama_cpp_targets
from benchmarks.servers import Setup, Target
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
    """`generate` one request at a time, in static batches, and continuous batching; or the one named."""
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


def _llama_cpp(setup: Setup, gguf: str) -> list[Target]:
    return llama_cpp_targets(setup, gguf, order=ORDER + 2)


PEERS: dict[str, Callable[[Setup, str], list[Target]]] = {
    "generate": _generate,
    "transformers": _transformers,
    "llama.cpp": _llama_cpp,
}


def peer_targets(name: str, setup: Setup) -> list[Target]:
    """A peer by name, with what may follow its `=`; or a server that runs already, by its URL.

    Raises:
        StartupError: there is no such peer, or it is not installed.
    """
    if name.startswith(("http://", "https://")):
        return [Target(label=name, order=ORDER + 9, module=None, options={}, url=name)]
    peer, _, argument = name.partition("=")
    if peer not in PEERS:
        raise StartupError(f"--peer {name}: there are {', '.join(PEERS)}, or the URL of a server")
    return PEERS[peer](setup, argument)
