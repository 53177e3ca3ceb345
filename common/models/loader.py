"""Reads weights from safetensors files straight into a model's parameters.

A file is a header (JSON: name, dtype, shape, byte range of every tensor) and the bytes. The safetensors library
reads and validates the header. The bytes are read here, each tensor into its rows of a parameter, so that loading
needs little more than the model's own memory. The library's tensors are views of a mapped file, and copying them
doubled the peak of memory. The library's `pread` backend allocates each tensor separately, and took twice the CPU
time of the code here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.errors import StartupError
from common.json_file import read_json
from common.models.layers import CausalLM, Linear, RMSNorm
from common.models.packed import Stored
from common.models.progress import shown
from kernels.grouped import Form

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

#: Fused matrices, and the names of the checkpoint's matrices that they hold, one below the other in this order.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

#: The name of the embedding in a checkpoint. A tied head has no name.
EMBEDDING = "model.embed_tokens.weight"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
_INTEGERS = {"I8": torch.int8, "I32": torch.int32, "I64": torch.int64}  # of quantized weights


WhenRead = Callable[[Linear], None]


def keep_as_read(_: Linear) -> None:
    """A `WhenRead` that changes nothing."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor's type, shape and place in a safetensors file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # first byte in the file
    num_bytes: int

    def read_into(self, target: Tensor) -> None:
        """Read the tensor's bytes from the file into `target`.

        If `target` has another type than the file, is on a GPU or is not contiguous, the bytes are read into a
        temporary tensor first, then converted and copied.
        """
        direct = target.device.type == "cpu" and target.dtype == self.dtype and target.is_contiguous()
        buffer = target if direct else torch.empty(self.shape, dtype=self.dtype)
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.offset)
            read_fully(file, buffer.view(-1).view(torch.uint8).numpy().data)
        if not direct:
            target.copy_(buffer)


def find_tensors(folder: Path, *, quantized: bool = False) -> dict[str, StoredTensor]:
    """Return the place of each tensor of a checkpoint, by the tensor's name. Reads no weights.

    The checkpoint has one safetensors file, or several (shards) with an index.

    Args:
        quantized: whether the tensors may be integers.

    Raises:
        StartupError: there are no safetensors files, a file is missing, truncated or malformed, or a tensor has a
            type that is not read.
    """
    dtypes = _DTYPES | (_INTEGERS if quantized else {})
    # First, as in transformers: where it saves one file, it leaves the index of earlier shards.
    if (folder / SINGLE_FILE).is_file():
        return _read_header(folder / SINGLE_FILE, dtypes)
    if (folder / INDEX_FILE).is_file():
        weight_map = read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, Mapping) or not all(isinstance(v, str) for v in weight_map.values()):
            raise StartupError(f"{folder / INDEX_FILE} has no weight_map from tensors to files")
        tensors: dict[str, StoredTensor] = {}
        there = {path.name for path in folder.iterdir()}
        for name in sorted(set(weight_map.values())):
            if name not in there:
                raise StartupError(f"{folder} lacks {name:.80}, which its {INDEX_FILE} names")
            tensors |= _read_header(folder / name, dtypes)
        return tensors
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise StartupError(
            f"{folder} holds only pickled weights ({pickles[0]}), which can run code when loaded: "
            "convert them to safetensors"
        )
    raise StartupError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")


def _read_header(path: Path, dtypes: Mapping[str, torch.dtype]) -> dict[str, StoredTensor]:
    """Return a file's tensors by name, in the order of the file.

    The safetensors library checks that they fill the file without gaps. So each begins where the one before ends.

    Raises:
        StartupError: the file cannot be read or is malformed, or a tensor's type is not in `dtypes`.
    """
    tensors: dict[str, StoredTensor] = {}
    try:
        with path.open("rb") as raw:
            offset = 8 + int.from_bytes(raw.read(8), "little")  # where the header ends
        with safe_open(path, framework="numpy") as file:
            for name in file.offset_keys():
                entry = file.get_slice(name)
                shape, kind = tuple(entry.get_shape()), entry.get_dtype()
                dtype = dtypes.get(kind)
                if dtype is None:
                    raise StartupError(f"{path}: {name} is stored as {kind}; we read {', '.join(dtypes)}")
                num_bytes = torch.Size(shape).numel() * dtype.itemsize
                tensors[name] = StoredTensor(path, dtype, shape, offset, num_bytes)
                offset += num_bytes
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error}") from None
    except SafetensorError as error:
        raise StartupError(
            f"{path} ({path.stat().st_size} bytes) is damaged, cut off or no safetensors file: {error}; "
            "download it again"
        ) from None
    return tensors


def checkpoint_tensors(model: CausalLM) -> dict[str, Tensor]:
    """Return a view of a model's parameters for each tensor of its checkpoint, by the checkpoint's names.

    A tied head has no view of its own. The model's modules have the names that they have in checkpoints, without
    the prefix `model.`. Only a fused matrix has another name: its rows are divided into the checkpoint's matrices.
    """
    tensors: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            sizes: Sequence[int] = module.sizes if isinstance(module, Linear) else (len(parameter),)
            if kind == "weight" and isinstance(module, Linear) and module.layout is not None:
                sizes = module.layout.byte_counts
            for name, rows in zip(_names(path), parameter.data.split(list(sizes)), strict=True):
                tensors[f"{name}.{kind}"] = rows
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors


def _names(path: str) -> list[str]:
    """Return the names that a module's matrices have in checkpoints, without `.weight`."""
    stem, _, own = path.rpartition(".")
    prefix = "".join(f"{part}." for part in ("" if path == "lm_head" else "model", stem) if part)
    return [f"{prefix}{name}" for name in FUSED.get(own, (own,))]


def stored_tensors(
    folder: Path, architecture: type[CausalLM], *, tied: bool, quantized: bool = False
) -> dict[str, Stored]:
    """Return the tensors of a checkpoint's language model, by the names that they have in checkpoints of it alone.

    Args:
        tied: whether the head is tied. Its copy of the embedding is left out.
        quantized: as for `find_tensors`, which also says what is raised.
    """
    stored: dict[str, Stored] = {
        _rename(name, architecture.renamed_prefixes): tensor
        for name, tensor in find_tensors(folder, quantized=quantized).items()
        # Old files hold rotary frequencies.
        if not name.startswith(architecture.skipped_prefixes) and not name.endswith("rotary_emb.inv_freq")
    }
    return {name: tensor for name, tensor in stored.items() if not (tied and name.startswith("lm_head."))}


def quantize_as_stored(model: CausalLM, names: Collection[str]) -> None:
    """Make the linear layers int8 for which a checkpoint has scales. The model is on the meta device.

    `names` are the names of the checkpoint's tensors.
    """
    for path, module in model.named_modules():
        if isinstance(module, Linear) and f"{_names(path)[0]}.weight_scale" in names:
            module.quantize()


def fused_with(name: str) -> list[str]:
    """Return the names of the matrices that are fused with a matrix of a checkpoint, and its own."""
    own = name.split(".")[-2]
    fused = next((names for names in FUSED.values() if own in names), (own,))
    return [name.replace(f"{own}.", f"{each}.") for each in fused]


def set_orders(model: CausalLM, order_of: Callable[[str], Tensor | None]) -> None:
    """Give linear layers in groups the order of their inputs.

    Args:
        order_of: takes the name of a matrix in a checkpoint. Returns [K] int64, or None: inputs are in order.
    """
    for path, module in model.named_modules():
        if isinstance(module, Linear) and module.layout is not None:
            module.order = order_of(f"{_names(path)[0]}.weight")


def make_groups(model: CausalLM, form_of: Callable[[str], Form | None]) -> None:
    """Replace weights by room for weights in groups. The model is on the meta device.

    A linear layer stays as it is if one of its matrices has no form.

    Args:
        form_of: takes the name of a matrix in a checkpoint, and returns the form in which it is held, if any.
    """
    embedding, tied = form_of(EMBEDDING), model.config.tie_word_embeddings
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            names = (
                [EMBEDDING]
                if tied and module is model.lm_head
                else [f"{name}.weight" for name in _names(path)]
            )
            forms = [form for name in names if (form := form_of(name)) is not None]
            if len(forms) == len(module.sizes):
                module.group(forms)
    if embedding is not None:
        model.group_embedding(embedding)


def fill_from(
    model: CausalLM,
    stored: Mapping[str, Stored],
    device: torch.device,
    when_read: WhenRead,
    *,
    origin: Path,
    shapes: str = "config.json",
    spelled: Callable[[str], str] = str,
    form_of: Callable[[str], Form | None] | None = None,
) -> None:
    """Allocate a model that was built on the meta device, and read its weights.

    All names and shapes are compared before memory is allocated.

    Args:
        stored: the tensors on disk, in the order in which they lie there: a disk then reads forward.
        when_read: as for `Checkpoint.fill`.
        origin: the checkpoint's folder or file, for the error message.
        shapes: the part of the checkpoint that the model's shapes come from, for the error message.
        spelled: takes a tensor's name in Hugging Face checkpoints, and returns its name in `stored`.
        form_of: the same for `make_groups`: matrices that have a form are read as groups.

    Raises:
        StartupError: tensors are missing, unexpected or of a wrong shape (the message has the first names), or a
            file ends early.
    """
    held = {spelled(name): rows for name, rows in checkpoint_tensors(model).items()}
    misshaped = [
        f"{name} is {list(stored[name].shape)}, {shapes} makes it {list(rows.shape)}"
        for name, rows in held.items()
        if name in stored and stored[name].shape != rows.shape
    ]
    problems = [
        f"{what}: {_some(names)}"
        for what, names in (
            ("missing", sorted(held.keys() - stored.keys())),
            ("unexpected", sorted(stored.keys() - held.keys())),
            ("wrong shape", misshaped),
        )
        if names
    ]
    if problems:
        raise StartupError(f"{origin}: the tensors do not fit its {shapes}. {'; '.join(problems)}")
    if form_of is not None:
        make_groups(model, form_of)
    model.materialise(device)
    held = {spelled(name): rows for name, rows in checkpoint_tensors(model).items()}
    unread = {
        module: {
            spelled(f"{name}.{kind}") for name in _names(path) for kind in dict(module.named_parameters())
        }
        for path, module in model.named_modules()
        if isinstance(module, Linear)
    }
    layer_of = {name: layer for layer, names in unread.items() for name in names}
    for name in shown((name, held[name].nbytes) for name in stored):
        stored[name].read_into(held.pop(name))  # a view that was kept would keep the memory
        if (layer := layer_of.get(name)) is not None:
            unread[layer].remove(name)
            if not unread[layer]:
                when_read(layer)


def _rename(name: str, prefixes: Mapping[str, str]) -> str:
    for theirs, ours in prefixes.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def read_fully(file: BinaryIO, view: memoryview) -> None:
    """Fill `view` from an unbuffered file. StartupError: the file ends before `view` is full."""
    done = 0
    while done < len(view):  # one call reads at most 2 GB
        count = os.readv(file.fileno(), [view[done:]])
        if count == 0:
            raise StartupError(f"{file.name} ended while it was being read")
        done += count


def fill_randomly(model: CausalLM, device: torch.device, seed: int, when_read: WhenRead) -> None:
    """Allocate a dummy and draw its weights: normally distributed, with deviation 0.02.

    Norm weights are not random: they get the value with which norms multiply by 1. Other weights are rounded to the
    checkpoint's type, like those of a real checkpoint.

    Args:
        when_read: as for `Checkpoint.fill`.
    """
    model.materialise(device)
    generator = torch.Generator(device).manual_seed(seed)
    for module in model.modules():
        if module is model.lm_head and model.config.tie_word_embeddings:
            continue  # drawn as the embedding
        for parameter in module.parameters(recurse=False):
            if isinstance(module, RMSNorm):
                parameter.data.fill_(1.0 - model.config.norm_offset)
            else:
                parameter.data.normal_(0.0, 0.02, generator=generator)
                parameter.data.copy_(parameter.data.to(model.config.dtype))
        if isinstance(module, Linear):
            when_read(module)
