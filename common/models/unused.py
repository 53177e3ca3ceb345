"""Finds what the files of a Hugging Face folder say and this server does not use, for one line in the log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from common.json_file import read_json_if_there
from common.models.config import ROPE_ENTRIES, JsonObject
from common.models.generation_config import NUMBERS, TOP_K
from common.text.chat_template import FOR_TOOLS

#: Files that are read, that repeat what those say, or that do not change what the model answers.
_KNOWN_FILES = (
    *(
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "added_tokens.json",
        "quantize_config.json",
        "quant_config.json",
    ),
    *("quant_log.csv", "recipe.yaml"),
    *("chat_template.jinja", "model*.safetensors", "model.safetensors.index.json"),
    *("tokenizer.model*", "vocab.*", "merges.txt", "special_tokens_map.json", "tekken.json", "params.json"),
    *("consolidated*", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.gguf"),
    *(".*", "README*", "LICENSE*", "NOTICE*", "*.md", "*.txt", "*.pdf", "*.png", "*.jpg", "*.jpeg"),
)

#: Entries of `generation_config.json` that are read, or that do not change what the model answers.
_KNOWN_GENERATION = (
    *(
        *NUMBERS,
        TOP_K,
        "eos_token_id",
        "bos_token_id",
        "pad_token_id",
        "do_sample",
        "use_cache",
        "max_length",
    ),
    *("_*", "transformers_version", "cache_implementation", "output_*", "return_*"),
)

#: Entries of `config.json` that ask for more than a language model, and the parts that they ask for.
_PARTS = {"auto_map": "its own code", "vision_config": "images", "audio_config": "sound"}

_MOST_NAMES = 8


def unused_in_folder(folder: Path, config: JsonObject, generation: JsonObject) -> list[str]:
    """Return what a checkpoint's files say and the server does not use: one text for each kind, with names.

    Args:
        folder: the checkpoint's folder.
        config: the object in its `config.json`.
        generation: the object in its `generation_config.json`.

    Raises:
        StartupError: the folder's `tokenizer_config.json` cannot be read.
    """
    kinds = {
        "chat templates": _templates(folder),
        "parts": (f"{part} ({key})" for key, part in _PARTS.items() if config.get(key)),
        "rotary settings": _rotary(config),
        "entries of generation_config.json": (
            key
            for key, value in generation.items()
            if value not in (None, False, 0, 1, [], {}) and not _matches(key, _KNOWN_GENERATION)
        ),
        "files": (
            path.name for path in folder.iterdir() if path.is_file() and not _matches(path.name, _KNOWN_FILES)
        ),
    }
    return [f"{kind}: {_joined(sorted(names))}" for kind, found in kinds.items() if (names := set(found))]


def _templates(folder: Path) -> Iterator[str]:
    """Yield the names of chat templates that no request can use."""
    templates = read_json_if_there(folder / "tokenizer_config.json").get("chat_template")
    if templates is not None and (folder / "chat_template.jinja").is_file():
        yield "the one in tokenizer_config.json"
    names = [path.stem for path in folder.glob("additional_chat_templates/*.jinja")]
    if isinstance(templates, list):
        names += [str(each.get("name")) for each in templates if isinstance(each, Mapping)]
    yield from (name for name in names if name not in ("default", FOR_TOOLS))


def _rotary(config: JsonObject) -> Iterator[str]:
    """Yield the names of settings of rotary embeddings that are not read."""
    if config.get("rope_parameters") is not None and config.get("rope_scaling") is not None:
        yield "rope_scaling"
    if config.get("partial_rotary_factor") not in (None, 1):
        yield "partial_rotary_factor"
    for name in ("rope_parameters", "rope_scaling"):
        settings: Any = config.get(name)
        if isinstance(settings, Mapping):
            yield from (f"{name}.{key}" for key in settings if key not in ROPE_ENTRIES)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _joined(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
