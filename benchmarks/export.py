"""Writes a dummy's weights as a Hugging Face folder, so that other servers can serve the same weights.

`python -m benchmarks export llama-135m FOLDER`
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from common.config import resolve_dtype
from common.errors import StartupError
from common.models.checkpoint import DummyCheckpoint
from common.models.loader import SINGLE_FILE, checkpoint_tensors, read_json
from common.models.registry import load_model, open_checkpoint
from common.zoo.presets import PRESETS

CPU = torch.device("cpu")

#: Fields of config.json that a preset lacks: the model class, and the ids of special tokens. They are copied from
#: the checkpoint whose tokenizer the dummy uses.
_LENT = ("architectures", "bos_token_id", "eos_token_id", "pad_token_id")


def export_dummy(name: str, folder: Path, dtype: str = "auto") -> None:
    """Write `dummy:PRESET` as config.json, safetensors and tokenizer files.

    Random weights are drawn in `dtype`, as a server draws them with the same `--dtype`. Another type gives other
    weights.

    Raises:
        StartupError: no dummy has that name, or the folder is not empty.
    """
    checkpoint = find_dummy(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StartupError(f"{folder} holds something already: name a new folder")
    resolved = resolve_dtype(dtype, checkpoint.config.dtype, CPU)
    model = load_model(checkpoint, device=CPU, dtype=resolved, max_positions=1)
    folder.mkdir(parents=True, exist_ok=True)
    # Each is copied: safetensors refuses tensors that share memory, and several may be rows of one parameter.
    tensors = {name: rows.clone() for name, rows in checkpoint_tensors(model).items()}
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    for path in checkpoint.tokenizer_folder.iterdir():
        if path.name.startswith("tokenizer") or path.name == "chat_template.jinja":
            shutil.copy(path, folder)
    config = json.dumps(_config(checkpoint, resolved), indent=2)
    (folder / "config.json").write_text(config + "\n", encoding="utf-8")


def find_dummy(name: str) -> DummyCheckpoint:
    """Return the checkpoint of a dummy. StartupError: the name stands for a folder or a GGUF file."""
    checkpoint = open_checkpoint(name)
    if checkpoint.folder is not None:
        raise StartupError(f"{name} is in a folder already, {checkpoint.folder}: only dummies are exported")
    if not isinstance(checkpoint, DummyCheckpoint):
        raise StartupError(f"{name} is a GGUF file: only dummies are exported as Hugging Face folders")
    return checkpoint


def _config(checkpoint: DummyCheckpoint, dtype: torch.dtype) -> dict[str, object]:
    lender = read_json(checkpoint.tokenizer_folder / "config.json")
    return {
        **{name: lender[name] for name in _LENT if name in lender},
        **PRESETS[checkpoint.name.removeprefix("dummy:")],
        "dtype": str(dtype).removeprefix("torch."),
    }
