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
from common.models.loader import SINGLE_FILE, checkpoint_tensors, read_json
from common.models.registry import Checkpoint, load_model, open_checkpoint
from common.zoo.presets import PRESETS

CPU = torch.device("cpu")

#: What a preset does not say of itself and its tokenizer's lender does: the class, and the ids of special tokens.
_LENT = ("architectures", "bos_token_id", "eos_token_id", "pad_token_id")


def export_dummy(name: str, folder: Path, dtype: str = "auto") -> None:
    """Write `dummy:PRESET` as config.json, safetensors and tokenizer files.

    Weights are drawn in the type they are served in, so another type is another model: `dtype` is what
    `--dtype` is for a server.

    Raises:
        StartupError: no dummy has that name, or the folder holds something already.
    """
    checkpoint = open_checkpoint(name)
    if checkpoint.weights is not None:
        raise StartupError(f"{name} is in a folder already, {checkpoint.weights}: only dummies are exported")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StartupError(f"{folder} holds something already: name a new folder")
    resolved = resolve_dtype(dtype, checkpoint.config.dtype, CPU)
    model = load_model(checkpoint, device=CPU, dtype=resolved, max_positions=1)
    folder.mkdir(parents=True, exist_ok=True)
    # A copy of each: several of ours may be rows of one parameter, which safetensors does not take.
    tensors = {name: rows.clone() for name, rows in checkpoint_tensors(model).items()}
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    for path in checkpoint.tokenizer_folder.iterdir():
        if path.name.startswith("tokenizer") or path.name == "chat_template.jinja":
            shutil.copy(path, folder)
    config = json.dumps(_config(checkpoint, resolved), indent=2)
    (folder / "config.json").write_text(config + "\n", encoding="utf-8")


def _config(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, object]:
    lender = read_json(checkpoint.tokenizer_folder / "config.json")
    return {
        **{name: lender[name] for name in _LENT if name in lender},
        **PRESETS[checkpoint.name.removeprefix("dummy:")],
        "dtype": str(dtype).removeprefix("torch."),
    }
