"""Finds and loads models by name.

A name is a folder, a GGUF file, a model that `infer fetch` knows, `zoo:NAME`, `dummy:PRESET`, or a Hugging Face hub
id, with a quantization if the model is a GGUF file there.

To add an architecture, write a subclass of `CausalLM`, or of a model that is already here, in a file of its own
(`mistral.py` and `qwen2.py` are the shortest), and enter it in `ARCHITECTURES`. For GGUF files, enter its name in
`_MODEL_TYPES` of `gguf/checkpoint.py`, too.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal, TypeVar

import huggingface_hub
import torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from common.errors import StartupError
from common.json_file import read_json, read_json_if_there
from common.models.checkpoint import Checkpoint, DummyCheckpoint, FolderCheckpoint
from common.models.compressed import read_scheme
from common.models.config import ConfigReader, JsonObject, ModelConfig, token_id_set
from common.models.fetch import FETCHABLE, find_fetched
from common.models.gemma3 import Gemma3
from common.models.generation_config import suggested_params
from common.models.gguf.checkpoint import GGUFCheckpoint, config_of, sampling_of
from common.models.gguf.file import GGUFFile, first_part, is_gguf
from common.models.layers import CausalLM, Quantization
from common.models.llama import Llama
from common.models.loader import keep_as_read, make_groups, stored_tensors
from common.models.mistral import Mistral
from common.models.packed import with_matrices
from common.models.presets import PRESETS, TOKENIZER_OF
from common.models.qwen2 import Qwen2
from common.models.qwen3 import Qwen3
from common.models.unused import unused_in_folder
from common.request import SamplingParams
from common.text.folder_vocabulary import FolderVocabulary
from kernels.grouped import Form

T = TypeVar("T")

#: Every architecture, by the `model_type` of a checkpoint's `config.json`.
ARCHITECTURES: dict[str, type[CausalLM]] = {
    "llama": Llama,
    "mistral": Mistral,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "gemma3_text": Gemma3,
    "gemma3": Gemma3,
}

ZOO = Path(__file__).resolve().parent.parent / "zoo"

GENERATION_CONFIG = "generation_config.json"
#: Files of old quantized checkpoints, and the method that wrote each.
_QUANTIZATION_CONFIGS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # never a path like ./name
#: As for llama.cpp and vLLM: the repository, and the end of a file's name, such as Q4_K_M.
_HUB_GGUF = re.compile(rf"({_HUB_ID.pattern}):(\w[\w.-]*?)(?:\.gguf)?")
#: GGUF files that turn pictures into a model's input, and statistics for quantizing.
_NO_MODELS = ["*mmproj*", "*imatrix*"]
_HUB_FILES = [
    "config.json",
    GENERATION_CONFIG,
    *_QUANTIZATION_CONFIGS,
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "model*.safetensors",
    "model.safetensors.index.json",
]


def parse_config(raw: JsonObject) -> ModelConfig:
    """Read a `config.json` object.

    Raises:
        StartupError: the architecture is not implemented, or an entry is missing, invalid or not implemented, or
            contradicts another entry. The message names the entry; the caller adds the file's name.
    """
    model_type = raw.get("model_type")
    architecture = ARCHITECTURES.get(str(model_type))
    if architecture is None:
        raise StartupError(
            f"model_type {model_type!r:.80} is not implemented; this server runs {', '.join(ARCHITECTURES)}"
        )
    return architecture.read_config(ConfigReader(raw))


def open_checkpoint(name: str) -> Checkpoint:
    """Find a model by its name, read its config, and return its checkpoint. The files of a hub id are downloaded.

    Raises:
        StartupError: there is no such model, its files cannot be read or downloaded, or its config is not
            supported.
    """
    if name.startswith("dummy:"):
        return _open_dummy(name)
    file = _find_gguf(name)
    folder = _find_folder(name) if file is None else file.parent
    try:
        return _open_folder(name, folder) if file is None else _open_gguf(name, file)
    except OSError as error:
        raise StartupError(f"{name} cannot be read: {error.strerror}") from None


def _open_folder(name: str, folder: Path) -> Checkpoint:
    raw = _with_quantization(folder, read_json(folder / "config.json"))
    config, scheme = _parse(folder / "config.json", raw, lambda raw: (parse_config(raw), read_scheme(raw)))
    generation = read_json_if_there(path := folder / GENERATION_CONFIG)
    # Any of the files may name the tokens that end an answer.
    eos = config.eos_token_ids | _parse(path, generation, lambda raw: token_id_set(raw.get("eos_token_id")))
    vocabulary = FolderVocabulary(folder)
    if (folder / "tokenizer.json").is_file():
        eos |= vocabulary.end_token_ids()
    known = frozenset(token_id for token_id in eos if 0 <= token_id < config.vocab_size)
    config = dataclasses.replace(config, eos_token_ids=known)
    tensors = None
    if scheme is not None:
        architecture, tied = ARCHITECTURES[config.architecture], config.tie_word_embeddings
        stored = stored_tensors(folder, architecture, tied=tied, quantized=True)
        tensors = _parse(folder, stored, lambda stored: with_matrices(stored, scheme))
    checkpoint = FolderCheckpoint(
        name, config, folder, vocabulary, generation, scheme=scheme, tensors=tensors
    )
    checkpoint.unused = [
        *([f"EOS tokens outside the vocabulary: {sorted(eos - known)}"] if known != eos else []),
        *(["quantized activations"] if scheme is not None and scheme.quantizes_activations else []),
        *vocabulary.unused,
        *unused_in_folder(folder, raw, generation),
    ]
    return checkpoint


def _with_quantization(folder: Path, raw: JsonObject) -> JsonObject:
    """Return a config with its `quantization_config`, which old folders have in a file of its own."""
    for file, method in _QUANTIZATION_CONFIGS.items():
        if "quantization_config" not in raw and (found := read_json_if_there(folder / file)):
            return {**raw, "quantization_config": {"quant_method": method, **found}}
    return raw


def default_params(checkpoint: Checkpoint) -> SamplingParams:
    """Return the sampling parameters that a checkpoint suggests. StartupError: a value is invalid."""
    origin = Path(checkpoint.name) if checkpoint.folder is None else checkpoint.folder / GENERATION_CONFIG
    return _parse(origin, checkpoint.generation_config, suggested_params)


def _open_gguf(name: str, path: Path) -> Checkpoint:
    """Open a GGUF file. If `infer fetch` knows the model by its name, its catalogue has the sampling parameters."""
    file = GGUFFile.open(path)
    checkpoint = GGUFCheckpoint(name, _parse(path, config_of(file), parse_config), file)
    checkpoint.unused = checkpoint.vocabulary.unused()
    checkpoint.generation_config = FETCHABLE[name].sampling if name in FETCHABLE else sampling_of(file)
    return checkpoint


def _parse(path: Path, raw: JsonObject, parse: Callable[[JsonObject], T]) -> T:
    """Return `parse(raw)`. `raw` is the content of the file at `path`, and error messages begin with this path."""
    try:
        return parse(raw)
    except StartupError as error:
        raise StartupError(f"{path}: {error}") from None


def _open_dummy(name: str) -> Checkpoint:
    preset = name.removeprefix("dummy:")
    if preset not in PRESETS:
        raise StartupError(f"no preset {preset!r}; there are {', '.join(f'dummy:{key}' for key in PRESETS)}")
    config = parse_config(PRESETS[preset])
    tokenizer_folder = ZOO / TOKENIZER_OF[config.architecture]
    lender = open_checkpoint(str(tokenizer_folder)).config
    config = dataclasses.replace(config, eos_token_ids=lender.eos_token_ids)
    return DummyCheckpoint(name, config, tokenizer_folder)


def load_model(
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_positions: int,
    keep_groups: bool = False,
    quantize: Quantization | None = None,
) -> CausalLM:
    """Build a checkpoint's model and fill its weights.

    Args:
        checkpoint: from `open_checkpoint`.
        device: the device of the weights.
        dtype: the type of weights and activations.
        max_positions: length of the rotary tables.
        keep_groups: as for `Checkpoint.fill`.
        quantize: how each layer is quantized as soon as it is read (`CausalLM.quantize`), if it is.

    Raises:
        StartupError: the weights do not fit the config, or cannot be read.
    """
    model = _without_memory(checkpoint.config, dtype, max_positions)
    if quantize is None:
        checkpoint.fill(model, device, keep_groups, when_read=keep_as_read)
    else:
        checkpoint.fill(model, device, keep_groups, when_read=lambda layer: layer.quantize(quantize))
        model.quantize(quantize)  # a tied head
    return model.eval()


def weight_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    packed: bool = False,
    quantized: Literal["none", "layers", "int8", "int4"] = "none",
    form_of: Callable[[str], Form | None] | None = None,
) -> int:
    """Return the bytes that a model's weights take in `dtype`, without allocating them.

    Args:
        packed: whether weights are packed for native kernels. A tied embedding is then held a second time, as the
            head. The panels are counted as if they had the size of the unpacked weights.
        quantized: whether the weights of linear layers are int8, all or those of all layers but the head, or int4.
        form_of: gives the forms of weights in groups (see `Checkpoint`). A tied embedding is then held once.
    """
    model = _without_memory(config, dtype, max_positions=1)
    if form_of is not None:
        make_groups(model, form_of)
    if quantized != "none":
        model.quantize("int4" if quantized == "int4" else "int8", head=quantized != "layers")
    total = sum(weight.nbytes for weight in model.parameters())
    twice = packed and config.tie_word_embeddings and model.lm_head.layout is None
    return total + (model.lm_head.weight.nbytes if twice else 0)


def _without_memory(config: ModelConfig, dtype: torch.dtype, max_positions: int) -> CausalLM:
    """Build a model on the meta device: shapes and types without memory."""
    with torch.device("meta"):
        return ARCHITECTURES[config.architecture](config, dtype, max_positions)


def _find_gguf(name: str) -> Path | None:
    """Return the GGUF file that a name stands for; None if the name stands for something else.

    The name may be that of the file, of a folder that holds one GGUF model and no Hugging Face checkpoint, of a
    model that `infer fetch` knows, or of a file on the hub, which is downloaded. Folders of GGUF files may have a
    `config.json`, but no safetensors. A file is known by its ending or by its first bytes. A model that is split
    into parts has the path of one of its parts.

    Raises:
        StartupError: there is no such file, there are several models, or the model is not fetched yet or cannot be
            downloaded.
    """
    path = Path(name)
    if path.is_dir():
        is_checkpoint = (path / "config.json").is_file() and any(path.glob("*.safetensors"))
        return None if is_checkpoint else _only_gguf(name, path.glob("*.gguf"))
    if name in FETCHABLE:
        return find_fetched(name)
    if not path.exists() and (on_hub := _HUB_GGUF.fullmatch(name)):
        return _download_gguf(name, *on_hub.groups())
    if name.lower().endswith(".gguf") and not path.is_file():
        raise StartupError(f"there is no GGUF file {path.absolute()}")
    return path if name.lower().endswith(".gguf") or is_gguf(path) else None


def _only_gguf(name: str, paths: Iterable[Path]) -> Path | None:
    """Return the one model of some GGUF files, or its first part; None: there is none.

    Raises:
        StartupError: there are several.
    """
    models = sorted(path for path in paths if not _matches(path, _NO_MODELS))
    names = [path.name for path in models]
    found = names[0] if len(names) == 1 else first_part(names)
    if names and found is None:
        raise StartupError(f"{name} holds several GGUF files: name one of {', '.join(names)}")
    return None if found is None else models[0].with_name(found)


def _matches(path: Path, patterns: list[str]) -> bool:
    return any(fnmatch(path.name, pattern) for pattern in patterns)


def _download_gguf(name: str, hub_id: str, ending: str) -> Path:
    """Download the GGUF file of a hub id whose name ends with `ending`, in small or capital letters.

    Raises:
        StartupError: there is none, there are several, or the file cannot be downloaded.
    """
    letters = "".join(f"[{each.lower()}{each.upper()}]" if each.isalpha() else each for each in ending)
    ends = [f"{letters}.gguf", f"{letters}-?????-of-?????.gguf"]
    patterns = [start + end for start in ("", "*[-._/]") for end in ends]  # F16 is no end of BF16
    folder = _download(hub_id, patterns)  # it may have other files from before
    found = _only_gguf(name, (path for path in folder.rglob("*.gguf") if _matches(path, patterns)))
    if found is None:
        raise StartupError(f"{hub_id} has no GGUF file on the hub whose name ends with {ending}")
    return found


def zoo_names() -> list[str]:
    """Return the names of the bundled models, such as `zoo:llama-tiny`."""
    return [f"zoo:{path.parent.name}" for path in sorted(ZOO.glob("*/config.json"))]


def _find_folder(name: str) -> Path:
    """Return the folder of a model's files. The files of a hub id are downloaded.

    Raises:
        StartupError: there is no such model, `name` is a file, or the files cannot be downloaded.
    """
    if name.startswith("zoo:"):
        folder = ZOO / name.removeprefix("zoo:")
        if not (folder / "config.json").is_file():
            known = ", ".join(zoo_names())
            raise StartupError(f"the zoo has no {name!r}; it has {known}")
        return folder
    folder = Path(name)
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise StartupError(f"{name} is a file: name the checkpoint's folder, {folder.parent}")
    if _HUB_ID.fullmatch(name):
        folder = _download(name, _HUB_FILES)
        if not (folder / "config.json").is_file():
            raise StartupError(
                f"{name} has no config.json; if it has GGUF files, name one by its end: {name}:Q4_K_M"
            )
        return folder
    raise StartupError(
        f"no model {name!r}: there is no folder {folder.absolute()}, "
        f"and it is neither a GGUF file, nor one of {', '.join(FETCHABLE)}, nor zoo:NAME, nor dummy:PRESET, "
        "nor a hub id like owner/name or owner/name:Q4_K_M"
    )


def _download(hub_id: str, files: list[str]) -> Path:
    """Download the files of a hub id that match these patterns, unless the cache has them. Returns their folder.

    Raises:
        StartupError: the files cannot be downloaded. The message says why.
    """
    try:
        found = huggingface_hub.snapshot_download(hub_id, allow_patterns=files, ignore_patterns=_NO_MODELS)
        return Path(found)
    except GatedRepoError:
        reason = "its owner wants their terms accepted first, on its page; then log in with `hf auth login`"
    except RepositoryNotFoundError:
        reason = "there is no such model, or it is private: log in with `hf auth login`"
    except Exception as error:  # HTTP, cache and name errors have no common base
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    raise StartupError(f"{hub_id} is no folder here, and cannot be downloaded from the hub: {reason}")
