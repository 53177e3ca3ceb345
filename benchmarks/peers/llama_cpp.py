"""llama.cpp's server, where it is installed: `--peer llama.cpp=model.gguf`."""

from __future__ import annotations

import shutil
import socket

from benchmarks.servers import Setup, Target
from common.errors import StartupError


def llama_cpp_targets(setup: Setup, gguf: str, *, order: float) -> list[Target]:
    """llama-server with as many parallel sequences, and as much KV memory, as the phases have.

    It needs the model as a GGUF file. That it is the same model, in comparable precision, is for the user to see.

    Raises:
        StartupError: there is no llama-server on PATH, or no file was named.
    """
    program = shutil.which("llama-server")
    if program is None:
        raise StartupError("--peer llama.cpp: there is no llama-server on PATH")
    if not gguf:
        raise StartupError("--peer llama.cpp: name the model's file: --peer llama.cpp=model.gguf")
    options = {
        "model": gguf,
        "host": "127.0.0.1",
        "port": str(_free_port()),
        "parallel": str(setup.slots),
        "ctx-size": str(setup.kv_tokens),
    }
    return [Target("llama.cpp", order, None, options, program=(program,))]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
