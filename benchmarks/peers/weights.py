"""The weights that peers serve: a checkpoint's folder, or the exported weights of a dummy or a GGUF file.

Exported weights are kept in `peers` in the user's cache folder, and reused while their source is the same.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.export import export
from common.devices.resolve import resolve_dtype
from common.models.checkpoint import DUMMY_SEED
from common.models.config import ModelConfig
from common.models.gguf.checkpoint import GGUFCheckpoint
from common.models.presets import PRESETS
from common.models.registry import open_checkpoint
from kernels.cache_folder import default_cache


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights in a Hugging Face folder, and the type to compute in."""

    folder: Path
    dtype: torch.dtype
    config: ModelConfig

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def kv_bytes_per_token(self) -> int:
        return self.config.kv_shape(self.dtype).bytes_per_token


def weights_of(model: str, dtype: str, cache: Path | None = None) -> Weights:
    """Return a model's weights in a Hugging Face folder. Dummies and GGUF files are exported to one first.

    Args:
        model: any name that a server takes.
        dtype: the number type to compute in, or `auto`.
        cache: where exported weights are kept; default: `peers` in the user's cache folder.

    Raises:
        StartupError: there is no such model, or it cannot be exported.
    """
    checkpoint = open_checkpoint(model)
    resolved = resolve_dtype(dtype, checkpoint.config.dtype, torch.device("cpu"))
    if checkpoint.folder is not None:
        return Weights(checkpoint.folder.resolve(), resolved, checkpoint.config)
    if isinstance(checkpoint, GGUFCheckpoint):
        source: object = (checkpoint.file.path.resolve(), checkpoint.file.path.stat().st_mtime_ns)
    else:
        source = (sorted(PRESETS[model.removeprefix("dummy:")].items()), DUMMY_SEED, torch.__version__)
    key = hashlib.sha256(repr((model, source, resolved)).encode()).hexdigest()[:16]
    folder = (cache or default_cache() / "peers") / key / "weights"
    if not folder.exists():
        export_whole(model, folder, str(resolved).removeprefix("torch."))
    return Weights(folder, resolved, checkpoint.config)


def export_whole(model: str, folder: Path, dtype: str) -> None:
    """Export a model into a temporary folder, which is moved when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    try:
        export(model, scratch / folder.name, dtype)
        try:
            os.rename(scratch / folder.name, folder)
        except OSError:
            if not folder.exists():  # if it exists, another process has made it meanwhile
                raise
    finally:
        shutil.rmtree(scratch)
