"""Turns the options `--device` and `--dtype` into a device and a type of numbers."""

from __future__ import annotations

import torch

from common.errors import StartupError


def resolve_device(name: str) -> torch.device:
    """Return the device that an option names. StartupError: cuda was asked for and there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise StartupError("--device cuda: torch finds no CUDA device here; use --device cpu or auto")
    return torch.device(name)


def resolve_dtype(name: str, checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type to compute in. `auto` is the checkpoint's type, or float32 if the device only emulates it.

    On older GPUs, which have float16 and no bfloat16, float16 does not replace bfloat16. The largest float16 number
    is 65,504, and activations of models that were trained in bfloat16 (Gemma 3) exceed it.
    """
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    return checkpoint if _is_native(checkpoint, device) else torch.float32


def _is_native(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether torch multiplies matrices of `dtype` by a device's own instructions. For float16 on a CPU, the
    answer is always False."""
    if dtype != torch.bfloat16:
        return dtype == torch.float32 or device.type == "cuda"
    if device.type == "cuda":  # from compute capability 8.0 on, and on AMD's cards
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # The names on x86 and on ARM. torch uses the instructions through oneDNN, which its builds for macOS lack.
    instructions = torch.cpu.get_capabilities()
    has_them = bool(instructions.get("avx512_bf16") or instructions.get("bf16"))
    return has_them and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]  # torch's own
