"""Writes a model as a Hugging Face folder, for the servers of other projects.

`python -m benchmarks export NAME FOLDER`. A dummy model is written with its random weights, a GGUF file with
dequantized weights. Peers get such folders, too: they are kept in the user's cache folder.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from common.devices.resolve import resolve_dtype
from common.errors import StartupError
from common.json_file import read_json
from common.models.checkpoint import Checkpoint, DummyCheckpoint
from common.models.gguf.checkpoint import GGUFCheckpoint, config_of
from common.models.loader import SINGLE_FILE, checkpoint_tensors
from common.models.presets import PRESETS
from common.models.registry import load_model, open_checkpoint

CPU = torch.device("cpu")

#: Fields of config.json that a preset lacks, copied from the checkpoint whose tokenizer the dummy uses.
_LENT = ("architectures", "bos_token_id", "eos_token_id", "pad_token_id")

#: The model class of transformers for each architecture.
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def export(name: str, folder: Path, dtype: str = "auto") -> None:
    """Write a model as config.json, safetensors and tokenizer files.

    A dummy's random weights are drawn in `dtype`, as a server draws them with the same `--dtype`. Another type
    gives other weights.

    Raises:
        StartupError: there is no such model, the model is in a Hugging Face folder already, config.json cannot
            describe it, or `folder` is not empty.
    """
    checkpoint = open_checkpoint(name)
    if checkpoint.folder is not None:
        raise StartupError(f"{name} is in a folder already, {checkpoint.folder}: only others are exported")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StartupError(f"{folder} holds something already: name a new folder")
    resolved = resolve_dtype(dtype, checkpoint.config.dtype, CPU)
    config = _config(checkpoint)
    model = load_model(checkpoint, device=CPU, dtype=resolved, max_positions=1)
    folder.mkdir(parents=True, exist_ok=True)
    # Tensors are copied: safetensors refuses tensors that share memory, such as rows of one parameter.
    tensors = {name: rows.clone() for name, rows in checkpoint_tensors(model).items()}
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    config["dtype"] = str(resolved).removeprefix("torch.")
    write_json(folder / "config.json", config)
    if isinstance(checkpoint, DummyCheckpoint):
        for path in checkpoint.tokenizer_folder.iterdir():
            if path.name.startswith("tokenizer") or path.name == "chat_template.jinja":
                shutil.copy(path, folder)
    elif isinstance(checkpoint, GGUFCheckpoint):
        checkpoint.vocabulary.backend().save(str(folder / "tokenizer.json"))
        write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the content of config.json. Raises StartupError if config.json cannot describe the model."""
    if isinstance(checkpoint, GGUFCheckpoint):
        config = config_of(checkpoint.file)
        if config["rope_parameters"].get("rope_type") == "divided":
            raise StartupError(f"{checkpoint.name}: config.json cannot hold the rotary divisors of this file")
        return {**config, "architectures": [_CLASSES[config["model_type"]]]}
    assert isinstance(checkpoint, DummyCheckpoint)
    lender = read_json(checkpoint.tokenizer_folder / "config.json")
    lent = {name: lender[name] for name in _LENT if name in lender}
    return {**lent, **PRESETS[checkpoint.name.removeprefix("dummy:")]}
