"""The weights that peers serve: a checkpoint's folder, or the exported weights of a dummy or a GGUF file.

If a library does not read Hugging Face folders, its worker converts the weights.

Exported and converted weights are kept in `peers` in the user's cache folder, and reused while their source is the
same.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.export import export
from benchmarks.peers.process import command, environment
from benchmarks.peers.workers.protocol import Options
from common.engine.config import resolve_dtype
from common.errors import StartupError
from common.models.checkpoint import DUMMY_SEED
from common.models.config import ModelConfig
from common.models.gguf.checkpoint import GGUFCheckpoint
from common.models.presets import PRESETS
from common.models.registry import open_checkpoint
from kernels.native import default_cache


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights in a Hugging Face folder, and the type to compute in.

    Attributes:
        key: a hash of the weights' source. It names the cache's folder for conversions of these weights.
        quantize: `int8`, or `none`.
    """

    model: str
    folder: Path
    dtype: torch.dtype
    config: ModelConfig
    key: str
    quantize: str = "none"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def kv_bytes_per_token(self) -> int:
        return self.config.kv_shape(self.dtype).bytes_per_token

    def options(self, *, max_seq_len: int, max_sequences: int, kv_tokens: int, threads: int) -> Options:
        """Return the options of a worker (a process that computes with one library) that serves these weights."""
        return Options(
            model=self.model,
            folder=str(self.folder),
            dtype=self.dtype_name,
            max_seq_len=max_seq_len,
            max_sequences=max_sequences,
            kv_tokens=kv_tokens,
            kv_bytes=kv_tokens * self.kv_bytes_per_token,
            threads=threads,
            quantize=self.quantize,
        )


def weights_of(model: str, dtype: str, cache: Path | None = None, quantize: str = "none") -> Weights:
    """Return a model's weights in a Hugging Face folder. Dummies and GGUF files are exported to one first.

    Args:
        model: any name that a server takes.
        dtype: the number type to compute in, or `auto`.
        cache: where exported weights are kept; default: `peers` in the user's cache folder.
        quantize: `int8`: libraries that read a format of their own get quantized weights.

    Raises:
        StartupError: there is no such model, or it cannot be exported.
    """
    checkpoint = open_checkpoint(model)
    resolved = resolve_dtype(dtype, checkpoint.config.dtype, torch.device("cpu"))
    if checkpoint.folder is not None:
        folder = checkpoint.folder.resolve()
        files = sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir())
        return Weights(model, folder, resolved, checkpoint.config, _key(folder, files), quantize)
    if isinstance(checkpoint, GGUFCheckpoint):
        source: object = (checkpoint.file.path.resolve(), checkpoint.file.path.stat().st_mtime_ns)
    else:
        source = (sorted(PRESETS[model.removeprefix("dummy:")].items()), DUMMY_SEED, torch.__version__)
    key = _key(model, source, resolved)
    name = str(resolved).removeprefix("torch.")
    folder = made_once((cache or _cache()) / key / "weights", lambda folder: export(model, folder, name))
    return Weights(model, folder, resolved, checkpoint.config, key, quantize)


def converted(weights: Weights, module: str, python: Path, version: str, cache: Path | None = None) -> Path:
    """Return the path of the weights in the format that a library reads. Its worker converts them if needed.

    Raises:
        StartupError: the library cannot convert them; the message has the last line that it printed.
    """

    def convert(target: Path) -> None:
        program = command(python, module, "convert", str(weights.folder), str(target), weights.quantize)
        done = subprocess.run(program, env=environment(), capture_output=True, text=True, errors="replace")
        if done.returncode != 0:
            said = (done.stderr.strip() or "(nothing)").splitlines()[-1]
            raise StartupError(f"{module} cannot convert {weights.model}: {said}")

    name = f"{module}-{version}" if weights.quantize == "none" else f"{module}-{version}-{weights.quantize}"
    return made_once((cache or _cache()) / weights.key / name, convert)


def made_once(target: Path, make: Callable[[Path], None]) -> Path:
    """Make a file or folder unless it exists. It is made in a temporary folder, and moved when complete.

    Args:
        target: the path of the file or folder, which is returned.
        make: writes to the path that it is called with.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
    try:
        make(scratch / target.name)
        try:
            os.rename(scratch / target.name, target)
        except OSError:
            if not target.exists():  # if it exists, another process has made it meanwhile
                raise
    finally:
        shutil.rmtree(scratch)
    return target


def _cache() -> Path:
    return default_cache() / "peers"


def _key(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
